"""Bounds on what a request costs at each token, and on its seed, against vLLM's own scheduler and sampler."""

from collections import defaultdict
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.sampling_params import RepetitionDetectionParams
from vllm.v1.core.sched.utils import check_sequence_repetition
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.parallel_sampling import ParentRequest
from vllm.v1.worker.gpu.sample.bad_words import BadWordsState
from vllm.v1.worker.gpu.sample.logit_bias import (
    MAX_NUM_LOGIT_BIAS_TOKENS,
    MAX_NUM_STOP_TOKEN_IDS,
    LogitBiasState,
)
from vllm.v1.worker.gpu.sample.states import SamplingStates

from serve_app.engine.vllm.sampler_bounds import (
    MAX_BAD_WORDS_CHARS,
    MAX_COMPARED,
    MAX_STOP_CHARS,
    bound_seed,
    oversize,
)

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
    assert oversize(fitting, processor()) is None
    error = oversize(large, processor())
    assert error is not None
    assert (error.status, error.param) == (400, field)
    assert "send fewer" in error.message
    # vLLM's runner before V2 has room, and goes through some of the lists at each token all the same.
    error = oversize(large, processor(v2=False))
    assert (error and error.param) == (field if field == "logit_bias" else None)
    for each in (fitting, large):
        # As vLLM does before it sends a request to the engine.
        each.update_from_generation_config(ENDS, EOS)
        each.update_from_tokenizer(Letters())
    sampled(fitting, LogitBiasState, BadWordsState)
    with pytest.raises(ValueError, match="Too many"):
        sampled(large, LogitBiasState, BadWordsState)


@pytest.mark.parametrize("v2", [False, True])
@pytest.mark.parametrize(
    ("field", "most", "value"),
    [
        # vLLM's scheduler looks through them at each token, whether the answer has a least length or not.
        ("stop_token_ids", MAX_NUM_STOP_TOKEN_IDS, lambda count: list(range(count))),
        ("logit_bias", MAX_NUM_LOGIT_BIAS_TOKENS, lambda count: dict.fromkeys(range(count), 1.0)),
        ("stop", MAX_STOP_CHARS, lambda count: ["a", "a" * (count - 1)]),
        # They would take the tokenizer long.
        ("bad_words", MAX_BAD_WORDS_CHARS, lambda count: ["a" * count]),
    ],
)
def test_a_list_that_is_long_for_each_token_is_an_error(
    v2: bool, field: str, most: int, value: Callable[[int], Any]
) -> None:
    error = oversize(SamplingParams(**{field: value(most + 1)}), processor(v2=v2))
    assert error is not None
    assert (error.status, error.param) == (400, field)
    assert f"at most {most} are allowed, since" in error.message
    if field != "bad_words":
        assert oversize(SamplingParams(**{field: value(most)}), processor(v2=v2)) is None


class Counted(list[int]):
    """Token ids that count how often they are looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def repetitions(largest: int, count: int, smallest: int = 0, max_tokens: int | None = None) -> SamplingParams:
    detection = RepetitionDetectionParams(
        max_pattern_size=largest, min_pattern_size=smallest, min_count=count
    )
    return SamplingParams(repetition_detection=detection, max_tokens=max_tokens)


@given(st.integers(0, 300), st.integers(2, 40), st.integers(0, 300), st.integers(0, 700))
@example(89, 2, 0, 100)
@example(127, 2, 64, 120)
@example(174, 2, 150, 298)
def test_what_is_allowed_compares_a_bounded_number_of_tokens(
    largest: int, count: int, smallest: int, same: int
) -> None:
    params = repetitions(largest, count, min(smallest, largest), max_tokens=same + 700)
    if oversize(params, processor()) is not None:
        return
    # Patterns are found wrong late in an answer that ends with the same token many times.
    ids = Counted([2] * 700 + [1] * same)
    check_sequence_repetition(ids, params.repetition_detection)
    # A comparison looks at one token, and each place of a pattern once more at its own.
    assert ids.looks <= 2 * MAX_COMPARED


def test_a_detector_that_compares_too_much_is_an_error() -> None:
    assert oversize(repetitions(89, 2), processor()) is None
    for detection in (
        repetitions(91, 2),
        repetitions(20_000, 3),
        repetitions(900, 2, 850),
        repetitions(1, 5000),
    ):
        error = oversize(detection, processor())
        assert error is not None
        assert (error.status, error.param) == (400, "repetition_detection")
        assert f"at most {MAX_COMPARED} are allowed" in error.message
    # A short answer never gets to the large patterns, and a detector that is off compares nothing.
    assert oversize(repetitions(20_000, 3, max_tokens=100), processor()) is None
    off = SamplingParams(repetition_detection=RepetitionDetectionParams(min_count=10**9))
    assert oversize(off, processor()) is None


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
