"""Bounds on fields that cost something at each token, against vLLM's own scheduler and sampler."""

import json
from collections import defaultdict
from collections.abc import Callable
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
from vllm.v1.worker.gpu.sample.logit_bias import LogitBiasState
from vllm.v1.worker.gpu.sample.states import SamplingStates

from serve_app.api.errors import RequestError
from serve_app.api.facts import BOUNDS, MOST_ANSWERS
from serve_app.settings.ingress import IngressSettings
from tests.serve_app.inspected import inspect

LIMITS = IngressSettings()
EOS = 2000


def refusal(path: str = "/v1/completions", **fields: Any) -> RequestError | None:
    """Return the error of a body with these fields; None: it is taken."""
    try:
        inspect(json.dumps(fields, separators=(",", ":")).encode(), path, LIMITS)
    except RequestError as error:
        return error
    return None


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


VALUES: dict[str, tuple[Callable[[int], Any], dict[str, Any]]] = {
    "logit_bias": (lambda size: {str(id): 1.0 for id in range(size)}, {}),
    "allowed_token_ids": (lambda size: list(range(size)), {}),
    "stop_token_ids": (lambda size: list(range(size)), {"min_tokens": 1}),
    # The brackets and quotes of the list are bytes too.
    "stop": (lambda size: ["a" * (size - 4)], {}),
    "stop_sequences": (lambda size: ["a" * (size - 4)], {}),
    "bad_words": (lambda size: ["a" * (size - 4)], {}),
    "vllm_xargs": (lambda size: {"a": "b" * (size - 8)}, {}),
    "length_penalty": (lambda size: -size, {}),
    "seed": (lambda size: size, {}),
}
"""For each field a value by its size, and fields that go with it."""


@pytest.mark.parametrize("field", VALUES)
def test_a_field_may_have_its_bound_and_no_more(field: str) -> None:
    value, more = VALUES[field]
    most = int(BOUNDS[field].most)
    assert refusal(**{field: value(most)}, **more) is None
    error = refusal(**{field: value(most + 1)}, **more)
    assert error is not None
    assert (error.status, error.param) == (400, field)
    assert error.message.startswith(f"{field}: ")
    assert f"at most {most} are allowed" in error.message


@pytest.mark.parametrize("field", ["logit_bias", "allowed_token_ids", "stop_token_ids"])
def test_the_sampler_of_a_gpu_has_room_for_what_is_taken(field: str) -> None:
    value, more = VALUES[field]
    given = value(int(BOUNDS[field].most))
    if isinstance(given, dict):
        given = {int(id): bias for id, bias in given.items()}
    params = SamplingParams(max_tokens=4, **{field: given}, **more)
    # As vLLM does before it sends a request to the engine: a model has tokens of its own that end an answer.
    params.update_from_generation_config({"eos_token_id": list(range(EOS, EOS + 64))}, EOS)
    sampled(params, LogitBiasState, BadWordsState)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e308, "11", "nan", [], True])
def test_a_length_penalty_that_is_no_exponent_is_refused(value: Any) -> None:
    error = refusal(length_penalty=value)
    assert error is not None
    assert error.param == "length_penalty"


@pytest.mark.parametrize("value", [5, [], "a", {"min_count": None}, {"max_pattern_size": 1.5}])
def test_a_detector_that_can_not_be_read_is_refused(value: Any) -> None:
    error = refusal(repetition_detection=value)
    assert error is not None
    assert error.param == "repetition_detection"


def test_the_bounds_hold_for_forms_too() -> None:
    body = b'--b\r\nContent-Disposition: form-data; name="length_penalty"\r\n\r\n11\r\n--b--\r\n'
    content_type = "multipart/form-data; boundary=b"
    with pytest.raises(RequestError, match="length_penalty"):
        inspect(body, "/v1/audio/transcriptions", LIMITS, content_type=content_type)


class Counted(list[int]):
    """Token ids that count how often they are looked at."""

    looks = 0

    def __getitem__(self, at: Any) -> Any:
        self.looks += 1
        return super().__getitem__(at)


def detection(largest: int, count: int, smallest: int = 0) -> dict[str, int]:
    return {"max_pattern_size": largest, "min_pattern_size": smallest, "min_count": count}


@given(st.integers(0, 300), st.integers(0, 40), st.integers(0, 300), st.integers(0, 700))
@example(89, 2, 0, 100)
@example(127, 2, 64, 120)
@example(174, 2, 150, 298)
def test_a_detector_compares_a_bounded_number_of_tokens(
    largest: int, count: int, smallest: int, same: int
) -> None:
    fields = detection(largest, count, min(smallest, largest))
    if (largest and count < 2) or refusal(repetition_detection=fields) is not None:
        return
    # Patterns are found wrong late in an answer that ends with the same token many times.
    ids = Counted([2] * 700 + [1] * same)
    check_sequence_repetition(ids, RepetitionDetectionParams(**fields))
    # A comparison looks at one token, and each place of a pattern once more at its own.
    assert ids.looks <= 2 * BOUNDS["repetition_detection"].most


def test_a_detector_that_compares_too_much_is_refused() -> None:
    taken = [detection(89, 2), detection(0, 10**9)]
    large = [detection(91, 2), detection(20_000, 3), detection(900, 2, 850), detection(1, 5000)]
    assert [refusal(repetition_detection=fields) for fields in taken] == [None] * len(taken)
    for fields in large:
        error = refusal(repetition_detection=fields)
        assert error is not None
        assert "at most 4096 are allowed" in error.message


def test_the_sampler_can_hold_the_seed_of_each_answer() -> None:
    params = SamplingParams(n=MOST_ANSWERS, seed=int(BOUNDS["seed"].most))
    parent = ParentRequest(
        EngineCoreRequest("a", [1], None, params, None, 0.0, None, None, None, external_req_id="a")
    )
    for index in (0, 1, MOST_ANSWERS - 1):
        _, child = parent.get_child_info(index)
        sampled(child, SamplingStates)
