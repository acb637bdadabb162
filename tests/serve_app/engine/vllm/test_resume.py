"""Streams that go on in another engine."""

from array import array
from dataclasses import replace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from serve_app.engine.answer import StreamTokens
from serve_app.engine.job import Job
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from serve_app.wire.frame import ID, to_ids
from tests.batcher.virtual import virtual
from tests.serve_app.engine.engine_doubles import Site, new_job, opened
from tests.serve_app.engine.vllm_doubles import Script, gated, output, run

DELTA = RequestOutputKind.DELTA


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
@virtual
async def test_a_stream_states_how_it_could_go_on(params: dict[str, Any], mode: str) -> None:
    async with opened() as site:
        job = new_job(facts={"answers": params.get("n", 1)})
        job.stream = StreamTokens()
        llm = gated(Script(output(1), output(2, finish="stop")), site)
        await run(llm, params=SamplingParams(max_tokens=4, output_kind=DELTA, **params), job=job)
        assert job.stream is not None
        assert job.stream.resume == mode
        assert to_ids(job.stream.take()) == ([1, 2] if mode == "tokens" else [])


def resuming(script: Script, site: Site, tokenizer: Any) -> Any:
    """Return a client with the parts that a resumed stream needs."""
    llm: Any = gated(script, site)
    llm.get_tokenizer = lambda: tokenizer
    llm.input_processor.renderer.get_eos_token_id = lambda: tokenizer.eos_token_id
    return llm


def going_on(sent: list[int]) -> Job:
    """Return the job of a stream that has sent some tokens."""
    job = new_job(resumes=True)
    job.request = replace(job.request, token_ids=array(ID, sent).tobytes())
    job.stream = StreamTokens()
    return job


@virtual
async def test_a_resumed_stream_repeats_its_text_with_the_first_new_token() -> None:
    async with opened() as site:
        tokenizer = AutoTokenizer.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path)
        sent, new = tokenizer("12").input_ids, tokenizer("3").input_ids
        script = Script(output(*new), output(finish="length"))
        llm = resuming(script, site, tokenizer)
        job = going_on(sent)
        results = await run(
            llm, params=SamplingParams(max_tokens=8, temperature=0, output_kind=DELTA), job=job
        )
        assert "".join(each.outputs[0].text for each in results) == "123"
        assert job.stream is not None
        assert to_ids(job.stream.take()) == [*sent, *new]
        (call,) = script.calls
        assert call["prompt"]["prompt_token_ids"] == [*range(10), *sent]
        assert call["params"].max_tokens == 8 - len(sent)


@virtual
async def test_a_resumed_stream_ends_with_the_token_that_completes_a_stop_string() -> None:
    async with opened() as site:

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        tokenizer = AutoTokenizer.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path)
        # The last token that was sent comes again. The engine, which knows no stop strings here, tells of
        # several tokens at once.
        llm = resuming(Script(output(*ids("23456"))), site, tokenizer)
        job = going_on(ids("12"))
        params = SamplingParams(max_tokens=20, temperature=0, stop=["4"], output_kind=DELTA)
        (last,) = await run(llm, params=params, job=job)
        completion = last.outputs[0]
        assert (completion.text, completion.stop_reason, last.finished) == ("123", "4", True)
        assert completion.token_ids == ids("1234")
