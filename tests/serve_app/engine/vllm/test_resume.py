"""Streams that go on in another engine."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from batcher import ContinuousBatcher
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.vllm.client import GatedLLM
from serve_app.relay.resume import StreamTokens, to_ids
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.vllm_doubles import Script, gated, output, run

DELTA = RequestOutputKind.DELTA


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=1024, max_queue_size=1) as batcher:
        yield batcher


@pytest.mark.parametrize(
    ("params", "mode"),
    [
        ({"temperature": 0}, "tokens"),
        ({"temperature": 1}, "tokens"),
        ({"temperature": 1, "seed": 1}, "again"),
        ({"temperature": 0, "presence_penalty": 1}, "again"),
        ({"temperature": 1, "presence_penalty": 1}, ""),
        ({"temperature": 0, "logprobs": 1}, "again"),
        ({"temperature": 0, "n": 1}, "tokens"),
        ({"temperature": 1, "n": 2}, ""),
    ],
)
async def test_a_stream_states_how_it_could_go_on(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, params: dict[str, Any], mode: str
) -> None:
    result = AdmissionResult(stream=StreamTokens())
    set_current(AdmissionRequest(), result)
    llm = gated(monkeypatch, Script(output(1), output(2, finish="stop")), batcher)
    await run(llm, params=SamplingParams(max_tokens=4, output_kind=DELTA, **params))
    assert result.stream is not None
    assert result.stream.resume == mode
    assert to_ids(result.stream.take()) == ([1, 2] if mode == "tokens" else [])


def resuming(
    monkeypatch: pytest.MonkeyPatch, script: Script, batcher: ContinuousBatcher, tokenizer: Any
) -> GatedLLM:
    """Return a client with the parts that a resumed stream needs."""
    llm: Any = gated(monkeypatch, script, batcher)
    llm.get_tokenizer = lambda: tokenizer
    llm.input_processor.renderer.get_eos_token_id = lambda: tokenizer.eos_token_id
    result: GatedLLM = llm
    return result


async def test_a_resumed_stream_repeats_its_text_with_the_first_new_token(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path)
    sent, new = tokenizer("12").input_ids, tokenizer("3").input_ids
    script = Script(output(*new), output(finish="length"))
    llm = resuming(monkeypatch, script, batcher, tokenizer)
    result = AdmissionResult(stream=StreamTokens())
    set_current(AdmissionRequest(token_ids=tuple(sent)), result)
    results = await run(llm, params=SamplingParams(max_tokens=8, temperature=0, output_kind=DELTA))
    assert "".join(each.outputs[0].text for each in results) == "123"
    assert result.stream is not None
    assert to_ids(result.stream.take()) == [*sent, *new]
    (call,) = script.calls
    assert call["prompt"]["prompt_token_ids"] == [*range(10), *sent]
    assert call["params"].max_tokens == 8 - len(sent)


async def test_a_resumed_stream_ends_with_the_token_that_completes_a_stop_string(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    def ids(text: str) -> list[int]:
        found: list[int] = tokenizer.encode(text, add_special_tokens=False)
        return found

    tokenizer = AutoTokenizer.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path)
    # The last token that was sent comes again. The engine, which knows no stop strings here, tells of several
    # tokens at once.
    llm = resuming(monkeypatch, Script(output(*ids("23456"))), batcher, tokenizer)
    result = AdmissionResult(stream=StreamTokens())
    set_current(AdmissionRequest(token_ids=tuple(ids("12"))), result)
    params = SamplingParams(max_tokens=20, temperature=0, stop=["4"], output_kind=DELTA)
    (last,) = await run(llm, params=params)
    completion = last.outputs[0]
    assert (completion.text, completion.stop_reason, last.finished) == ("123", "4", True)
    assert completion.token_ids == ids("1234")
    assert result.usage.output_tokens == 4
