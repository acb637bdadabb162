"""Completions of `/generate` on a vLLM client that the test scripts."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.serial_utils import MsgpackEncoder

from batcher import ContinuousBatcher
from serve_app.api.errors import RequestError
from serve_app.api.protocol import SamplingFields
from serve_app.engine.adapters import AdapterFiles
from serve_app.engine.vllm.completions import Completion, Completions
from serve_app.engine.vllm.lora import Adapters
from serve_app.ledger.calls import CallBook
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.vllm_doubles import CONTEXT, Script, gated, output

PROMPT = list(range(100))


@pytest.fixture
def script() -> Script:
    return Script(output(1, 2, text="ab", finish="stop"))


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=1024, max_queue_size=1) as batcher:
        yield batcher


@pytest.fixture
def completions(monkeypatch: pytest.MonkeyPatch, script: Script, batcher: ContinuousBatcher) -> Completions:
    llm = gated(monkeypatch, script, batcher)
    adapters = Adapters(LLMSettings(id="demo", source=DEMO_MODEL), llm, AdapterFiles(), {}, CallBook("demo"))
    return Completions(llm, adapters, {"max_tokens": 16, "temperature": 0.5}, CONTEXT)


def unencodable() -> EngineGenerateError:
    """Return what vLLM raises where its protocol can't carry a value."""
    try:
        try:
            MsgpackEncoder().encode(2**64)
        except OverflowError as cause:
            raise EngineGenerateError from cause
    except EngineGenerateError as error:
        return error
    raise AssertionError


async def refusal(completions: Completions, token_ids: list[int], **fields: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        await completions.complete(token_ids, completions.sampling(SamplingFields(**fields)))
    return caught.value


async def test_a_completion_has_text_reason_and_tokens(completions: Completions) -> None:
    done = await completions.complete(PROMPT, completions.sampling(SamplingFields()))
    assert done == Completion("ab", "stop", 2)


async def test_fields_of_the_request_go_before_those_of_the_config(
    completions: Completions, script: Script
) -> None:
    await completions.complete(PROMPT, completions.sampling(SamplingFields(max_tokens=3)))
    params = script.calls[0]["params"]
    assert (params.max_tokens, params.temperature) == (3, 0.5)


def test_values_that_vllm_refuses_are_a_400_in_its_words(completions: Completions) -> None:
    with pytest.raises(RequestError, match="min_tokens") as caught:
        completions.sampling(SamplingFields(max_tokens=1, min_tokens=5))
    assert caught.value.status == 400


async def test_a_default_of_max_tokens_is_reduced_to_what_fits(
    completions: Completions, script: Script
) -> None:
    prompt = list(range(CONTEXT - 5))
    await completions.complete(prompt, completions.sampling(SamplingFields()))
    assert script.calls[0]["params"].max_tokens == 5


async def test_max_tokens_of_the_request_is_not_reduced_but_refused(completions: Completions) -> None:
    error = await refusal(completions, list(range(CONTEXT - 5)), max_tokens=6)
    assert error.status == 400
    assert "lower max_tokens to 5" in error.message


@pytest.mark.parametrize("length", [0, CONTEXT, CONTEXT + 1])
async def test_a_prompt_that_is_empty_or_fills_the_context_is_refused(
    completions: Completions, script: Script, length: int
) -> None:
    assert (await refusal(completions, list(range(length)))).status == 400
    assert script.calls == []


@pytest.mark.parametrize(
    ("failure", "status"),
    [
        (VLLMValidationError("bad value"), 400),
        (unencodable(), 400),
        (EngineDeadError(), 503),
        (EngineGenerateError(), 500),
        (KeyError("inside"), 500),
        (ValueError("ours"), 500),
        (output(finish="error"), 500),
        (None, 500),
    ],
    ids=[
        "the request",
        "a value too large for the engine",
        "the engine",
        "a fault of the engine",
        "a fault",
        "a fault by a value",
        "an error in the engine",
        "no result",
    ],
)
async def test_failures_of_vllm_have_a_status(
    completions: Completions, script: Script, failure: Any, status: int
) -> None:
    script.results = [] if failure is None else [failure]
    error = await refusal(completions, PROMPT)
    assert error.status == status
    assert "inside" not in error.message


async def test_a_refusal_of_the_batcher_comes_as_it_is(
    completions: Completions, batcher: ContinuousBatcher
) -> None:
    await batcher.stop()
    assert (await refusal(completions, PROMPT)).status == 503


async def test_an_adapter_that_was_removed_meanwhile_is_a_404(
    completions: Completions, script: Script
) -> None:
    with pytest.raises(RequestError, match="does not exist") as caught:
        await completions.complete(PROMPT, completions.sampling(SamplingFields()), "demo:words")
    assert (caught.value.status, script.calls) == (404, [])
