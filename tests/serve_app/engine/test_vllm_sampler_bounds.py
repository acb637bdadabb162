"""Bounds on the token ids and the seed of a request, against vLLM's own sampler."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from vllm import SamplingParams
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.states import SamplingStates

from serve_app.engine.vllm_sampler_bounds import MAX_BAD_WORDS_CHARS, bound_seed, oversize_ids

EOS = 2000
ENDS = {"eos_token_id": [EOS, EOS + 1]}
"""The tokens that end an answer by the model's own configuration."""


class Letters:
    """Stands for a tokenizer: each letter is a token."""

    max_token_id = 255

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        assert not add_special_tokens
        return list(text.encode())


def processor(*, v2: bool = True) -> Any:
    return SimpleNamespace(
        vllm_config=SimpleNamespace(use_v2_model_runner=v2),
        generation_config_fields=ENDS,
        renderer=SimpleNamespace(get_eos_token_id=lambda: EOS),
        tokenizer=Letters(),
    )


class Buffer:
    """Stands for a buffer of vLLM's sampler, with one request."""

    def __init__(self, dtype: Any = np.int32) -> None:
        self.np = np.zeros(1, dtype)

    def stage_write(self, *_: Any) -> None:
        pass


class Buffers(defaultdict[str, Any]):
    """The buffers of a part of the sampler, by their names."""

    __getattr__ = defaultdict.__getitem__


def sampled(params: SamplingParams, *parts: Any) -> None:
    """Give a request to parts of the sampler, as the engine does."""
    for part in parts:
        buffers = Buffers(Buffer, prompt_len_np=[5], use_logit_bias=[False], vocab_size=1000)
        buffers.update(seeds=Buffer(np.int64), seeds_set=[False], num_logprobs=[0])
        part.add_request(buffers, 0, params)


@pytest.mark.parametrize(
    ("field", "most", "params"),
    [
        ("logit_bias", 1024, lambda count: {"logit_bias": dict.fromkeys(range(count), 1.0)}),
        ("allowed_token_ids", 1024, lambda count: {"allowed_token_ids": list(range(count))}),
        # The model's own configuration has two more.
        ("stop_token_ids", 126, lambda count: {"stop_token_ids": list(range(count)), "min_tokens": 1}),
        ("bad_words", 1024, lambda count: {"bad_words": ["a" * count]}),
    ],
    ids=["logit_bias", "allowed_token_ids", "stop_token_ids", "bad_words"],
)
def test_more_ids_than_the_sampler_has_room_for_are_an_error(
    field: str, most: int, params: Callable[[int], dict[str, Any]]
) -> None:
    fitting, large = (SamplingParams(max_tokens=4, **params(count)) for count in (most, most + 1))
    assert oversize_ids(fitting, processor()) is None
    error = oversize_ids(large, processor())
    assert error is not None
    assert (error.status, error.param) == (400, field)
    assert "send fewer" in error.message
    assert oversize_ids(large, processor(v2=False)) is None
    for each in (fitting, large):
        # As vLLM does before it sends a request to the engine.
        each.update_from_generation_config(ENDS, EOS)
        each.update_from_tokenizer(Letters())
    sampled(fitting, LogitBiasState, BadWordsState)
    with pytest.raises(ValueError, match="Too many"):
        sampled(large, LogitBiasState, BadWordsState)


def test_ids_that_end_an_answer_are_bounded_only_where_it_has_a_least_length() -> None:
    params = SamplingParams(stop_token_ids=list(range(1000)))
    assert oversize_ids(params, processor()) is None
    sampled(params, LogitBiasState)


@pytest.mark.parametrize("v2", [False, True])
def test_words_that_take_the_tokenizer_long_are_an_error_without_it(v2: bool) -> None:
    error = oversize_ids(SamplingParams(bad_words=["a" * (MAX_BAD_WORDS_CHARS + 1)]), processor(v2=v2))
    assert error is not None
    assert (error.status, error.param) == (400, "bad_words")


@pytest.mark.parametrize("seed", [2**63 - 1, 2**63 - 2, 7, -(2**63), None])
def test_the_sampler_can_hold_the_seed_of_each_answer(seed: int | None) -> None:
    params = SamplingParams(n=3, seed=seed)
    bound_seed(params)
    parent = ParentRequest(
        EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None, external_req_id="a")
    )
    children = [parent.get_child_info(index)[1] for index in range(3)]
    for child in children:
        sampled(child, SamplingStates)
    if seed is not None:
        assert len({child.seed for child in children}) == 3
        assert params.seed == min(seed, 2**63 - 3)


def test_the_seed_of_one_answer_stays_as_it_is() -> None:
    params = SamplingParams(seed=2**63 - 1)
    bound_seed(params)
    assert params.seed == 2**63 - 1
