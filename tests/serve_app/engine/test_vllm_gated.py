"""Admission in front of vLLM's engine client."""

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.engine import EngineCoreRequest
from vllm.v1.engine.output_processor import OutputProcessor, RequestOutputCollector
from vllm.v1.engine.parallel_sampling import ParentRequest

from batcher import ContinuousBatcher
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.autoscaling import SEQUENCES, autoscaling_stats
from serve_app.engine.stream_interval import StreamInterval
from serve_app.engine.vllm_gated import RefusedError
from serve_app.relay.resume import StreamTokens, to_ids
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.vllm_doubles import BLOCK, CONTEXT, Script, gated, output

LIMIT_S = 20.0
DELTA = RequestOutputKind.DELTA
TEN = tokens_input(list(range(10)))


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=1024, max_queue_size=1) as batcher:
        yield batcher


async def run(llm: Any, prompt: Any = TEN, params: SamplingParams | None = None) -> list[Any]:
    async with asyncio.timeout(LIMIT_S):
        return [each async for each in llm.generate(prompt, params or SamplingParams(max_tokens=4), "r")]


@pytest.mark.parametrize(
    ("params", "cost"),
    [
        # 10 + 4 tokens are one block of 16; 10 + 7 are two.
        ({"max_tokens": 4}, BLOCK),
        ({"max_tokens": 7}, 2 * BLOCK),
        ({"max_tokens": 7, "n": 3}, 6 * BLOCK),
        # Without a limit of its own a text may fill the context; never more.
        ({"max_tokens": None}, CONTEXT),
        ({"max_tokens": 1000}, CONTEXT),
    ],
)
async def test_a_request_reserves_the_blocks_of_its_prompt_and_its_longest_output(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, params: dict[str, Any], cost: int
) -> None:
    script = Script(output(1), output(finish="stop"))
    await run(gated(monkeypatch, script, batcher), params=SamplingParams(**params))
    assert script.costs == [cost]
    assert batcher.stats.running_cost == 0


async def test_a_full_queue_refuses_and_the_engine_never_sees_the_request(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1))
    llm = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    async with batcher.slot(1024):
        waiting = asyncio.ensure_future(run(llm))
        await asyncio.sleep(0)
        assert batcher.stats.queue_depth == 1
        set_current(AdmissionRequest(), result)
        with pytest.raises(RefusedError) as caught:
            await run(llm)
        assert script.calls == []
    await waiting
    assert caught.value.error is result.refusal
    assert result.refusal is not None
    assert result.refusal.status == 429
    assert not result.admitted


async def test_an_admitted_request_has_its_usage_once_it_ends(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    llm = gated(monkeypatch, Script(output(1, 2), output(1, 2, 3, finish="stop")), batcher)
    result = AdmissionResult()
    set_current(AdmissionRequest(), result)
    await run(llm)
    assert result.admitted
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (10, 3)
    assert llm.prompt_tokens == 10


async def test_a_request_that_is_closed_early_frees_its_slot_and_its_engine(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1), output(2))
    results = gated(monkeypatch, script, batcher).generate(TEN, SamplingParams(max_tokens=4), "r")
    await anext(results)
    assert batcher.stats.running == 1
    await results.aclose()
    assert batcher.stats.running == 0
    assert script.closed == 1


@pytest.mark.parametrize("by_priority", [False, True])
async def test_vllm_gets_the_tier_of_the_request_where_it_schedules_by_priority(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, by_priority: bool
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher, by_priority=by_priority)
    set_current(AdmissionRequest(Scheduling(priority=1)), AdmissionResult())
    async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), "r", priority=-5):
        pass
    assert script.calls[0]["priority"] == (1 if by_priority else -5)


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


@pytest.mark.parametrize(
    ("asked", "engines", "paced"), [(None, 1, True), (None, 4, False), (1, 1, False), (7, 7, False)]
)
async def test_the_pieces_of_a_stream_keep_the_rate_unless_an_interval_is_set(
    monkeypatch: pytest.MonkeyPatch,
    batcher: ContinuousBatcher,
    asked: int | None,
    engines: int,
    paced: bool,
) -> None:
    llm: Any = gated(monkeypatch, Script(output(1), output(2), output(3, finish="stop")), batcher)
    state = SimpleNamespace(
        stream_interval=engines,
        sent_tokens_offset=0,
        detokenizer=SimpleNamespace(num_output_tokens=lambda: 2),
    )
    llm.output_processor.external_req_ids = {"r": ["r-0", "r-1"]}
    llm.output_processor.request_states = {"r-0": state}
    params = SamplingParams(max_tokens=4, output_kind=DELTA)
    params.stream_interval = asked
    await run(llm, params=params)
    assert isinstance(state.stream_interval, StreamInterval) == paced
    assert state.sent_tokens_offset == (2 if paced else 0)
    assert llm.piece_rate.streams == 0


async def test_an_embedding_request_reserves_its_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher)
    async for _ in llm.encode(tokens_input(list(range(17))), SimpleNamespace(), "r"):
        pass
    assert script.costs == [2 * BLOCK]
    # Its result counts as the first token, for goals.
    assert (llm.prompt_tokens, batcher.stats.output_tokens) == (17, 0)
    assert batcher.stats.ttft_p50_s is not None


async def test_a_prompt_of_an_encoder_reserves_its_tokens_alone(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher)
    # vLLM's own block, where there is no KV cache.
    llm.vllm_config.cache_config.num_gpu_blocks = 1
    async for _ in llm.encode(tokens_input(list(range(17))), SimpleNamespace(), "r"):
        pass
    assert script.costs == [17]


async def test_the_texts_of_an_embedding_are_as_many_records_with_the_priority_of_their_tier(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(SimpleNamespace())
    llm: Any = gated(monkeypatch, script, batcher, by_priority=True)
    result = AdmissionResult()
    # The queue has one place; texts after the first one wait for it.
    set_current(AdmissionRequest(Scheduling(priority=10, tenant="a")), result)

    async def embed(text: int) -> None:
        async for _ in llm.encode(tokens_input([1] * text), SimpleNamespace(), f"r-{text}", priority=-5):
            pass

    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*(embed(text) for text in (3, 4, 5)))
    assert [call["priority"] for call in script.calls] == [10, 10, 10]
    assert (batcher.stats.total_completed, result.asked) == (3, 3)
    assert (result.usage.prompt_tokens, result.usage.output_tokens) == (12, 0)


@pytest.mark.parametrize("prompt", ["a text", {"type": "multimodal"}])
async def test_a_prompt_of_unknown_length_reserves_the_context(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, prompt: Any
) -> None:
    script = Script(output(1, finish="stop"))
    await run(gated(monkeypatch, script, batcher), prompt)
    assert script.costs == [CONTEXT]


async def test_a_resumed_stream_repeats_its_text_with_the_first_new_token(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path)
    sent, new = tokenizer("12").input_ids, tokenizer("3").input_ids
    script = Script(output(*new), output(finish="length"))
    llm: Any = gated(monkeypatch, script, batcher)
    llm.get_tokenizer = lambda: tokenizer
    llm.input_processor = SimpleNamespace(
        generation_config_fields={},
        renderer=SimpleNamespace(get_eos_token_id=lambda: tokenizer.eos_token_id),
    )
    result = AdmissionResult(stream=StreamTokens())
    set_current(AdmissionRequest(token_ids=tuple(sent)), result)
    results = await run(llm, params=SamplingParams(max_tokens=8, temperature=0, output_kind=DELTA))
    assert "".join(each.outputs[0].text for each in results) == "123"
    assert result.stream is not None
    assert to_ids(result.stream.take()) == [*sent, *new]
    (call,) = script.calls
    assert call["prompt"]["prompt_token_ids"] == [*range(10), *sent]
    assert call["params"].max_tokens == 8 - len(sent)


@pytest.mark.parametrize(("asked", "most", "given"), [(None, 5, 5), (9, 5, 5), (3, 5, 3), (9, None, 9)])
async def test_an_answer_that_states_no_limit_gets_that_of_the_ingress(
    monkeypatch: pytest.MonkeyPatch,
    batcher: ContinuousBatcher,
    asked: int | None,
    most: int | None,
    given: int,
) -> None:
    script = Script(output(1, finish="stop"))
    set_current(AdmissionRequest(max_tokens=most), AdmissionResult())
    await run(gated(monkeypatch, script, batcher), params=SamplingParams(max_tokens=asked))
    assert script.calls[0]["params"].max_tokens == given


async def test_a_list_longer_than_the_queue_waits_behind_its_first_prompt(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    llm = gated(monkeypatch, Script(output(1, finish="stop")), batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    async with batcher.slot(1024):
        # The queue has one place.
        running = [asyncio.ensure_future(run(llm)) for _ in range(3)]
        await asyncio.sleep(0)
        assert not any(each.done() for each in running)
    assert [len(results) for results in await asyncio.gather(*running)] == [1, 1, 1]


async def test_a_request_that_was_admitted_has_met_its_deadline(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    llm = gated(monkeypatch, Script(output(1, finish="stop")), batcher)
    set_current(AdmissionRequest(deadline=time.monotonic() + 0.05), AdmissionResult())
    await run(llm)
    # The next prompt of its list comes later.
    await asyncio.sleep(0.06)
    assert len(await run(llm)) == 1


async def test_answers_that_never_fit_together_are_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    set_current(AdmissionRequest(), result)
    # The capacity is eight contexts.
    with pytest.raises(RefusedError) as caught:
        await run(llm, params=SamplingParams(n=9, max_tokens=None))
    assert caught.value.error is result.refusal
    assert (caught.value.error.status, caught.value.error.param) == (400, "n")
    assert "lower n or max_tokens" in caught.value.error.message
    assert script.calls == []
    await run(llm, params=SamplingParams(n=8, max_tokens=None))
    await run(llm, params=SamplingParams(n=9, max_tokens=4))


async def test_answers_are_as_many_records_and_a_priority_request_goes_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """110 `flex` requests of eight answers: 880 sequences for 256 places."""
    requests, answers, places = 110, 8, 256
    started: list[str] = []
    go = asyncio.Event()

    class Held(Script):
        async def run(
            self, prompt: Any, params: Any, request_id: str, **options: Any
        ) -> AsyncGenerator[Any, None]:
            started.append(request_id)
            await go.wait()
            yield output(1, finish="stop")

    async with ContinuousBatcher(capacity=1_000_000, max_running=places) as batcher:
        llm = gated(monkeypatch, Held(), batcher)

        async def ask(name: str, priority: int, n: int) -> None:
            scheduling = Scheduling(priority=priority, tenant=name)
            set_current(AdmissionRequest(scheduling), AdmissionResult())
            async for _ in llm.generate(TEN, SamplingParams(max_tokens=4, n=n), name):
                pass

        tasks = [asyncio.ensure_future(ask("flex", 10, answers)) for _ in range(requests)]
        try:
            await asyncio.sleep(0)
            stats = batcher.stats
            assert (stats.running, len(started)) == (places, places // answers)
            assert stats.queue_depth == requests * answers - places
            # The report to the autoscaler has all sequences.
            assert autoscaling_stats(stats)[SEQUENCES] == requests * answers
            tasks.append(asyncio.ensure_future(ask("live", -10, 1)))
            # No place is free: it is the first of those that wait.
            await asyncio.sleep(0)
        finally:
            go.set()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*tasks)
    assert started[places // answers] == "live"
    assert batcher.stats.total_completed == requests * answers + 1


@pytest.mark.parametrize(("tenant", "turn"), [("default", 2), ("acme", 20)])
async def test_a_flood_on_an_adapter_holds_up_another_only_within_a_named_tenant(
    monkeypatch: pytest.MonkeyPatch, tenant: str, turn: int
) -> None:
    started: list[str] = []
    go = asyncio.Event()

    class Held(Script):
        async def run(
            self, prompt: Any, params: Any, request_id: str, **options: Any
        ) -> AsyncGenerator[Any, None]:
            started.append(request_id)
            await go.wait()
            yield output(1, finish="stop")

    async with ContinuousBatcher(capacity=1_000, max_running=1) as batcher:
        llm = gated(monkeypatch, Held(), batcher)

        async def ask(adapter: str) -> None:
            request = AdmissionRequest(Scheduling(tenant=tenant), adapter=adapter)
            set_current(request, AdmissionResult())
            async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), adapter):
                pass

        tasks = [asyncio.ensure_future(ask("demo:letters")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(ask("demo:symbols")))
        await asyncio.sleep(0)
        go.set()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    assert started.index("demo:symbols") == turn


async def test_more_answers_than_the_engine_runs_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ContinuousBatcher(capacity=10_000, places=4, oversize="alone") as batcher:
        llm = gated(monkeypatch, Script(output(1, finish="stop")), batcher)
        set_current(AdmissionRequest(), AdmissionResult())
        with pytest.raises(RefusedError, match="n: 5 answers must start together"):
            await run(llm, params=SamplingParams(max_tokens=4, n=5))
        await run(llm, params=SamplingParams(max_tokens=4, n=4))


async def test_more_logprobs_of_a_prompt_than_the_loop_can_make_are_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    # Ten tokens; the bound is 100.
    await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=9))
    with pytest.raises(RefusedError, match=r"10 prompt tokens with 11 logprobs each.*max_prompt_logprobs"):
        await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=10))
    with pytest.raises(RefusedError, match="10 prompt tokens with 1000 logprobs each"):
        await run(llm, params=SamplingParams(max_tokens=4, prompt_logprobs=-1))
    assert len(script.calls) == 1
    assert batcher.stats.total_submitted == 1


def searched(llm: Any, steps: int = 1, **params: Any) -> AsyncGenerator[Any, None]:
    """Return the results of a beam search that asks the engine so many times."""

    async def search(*, prompt: Any, params: Any, request_id: str) -> AsyncGenerator[Any, None]:
        for _ in range(steps):
            await asyncio.gather(*(run(llm, prompt) for _ in range(params.beam_width)))
        yield output(*range(params.max_tokens), finish="length")

    results: AsyncGenerator[Any, None] = llm.beam_search(
        search, prompt=TEN, params=BeamSearchParams(**params), request_id="r"
    )
    return results


async def test_a_beam_search_is_admitted_once_with_all_its_beams(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    result = AdmissionResult()
    # Its deadline is met when it starts, and a full queue doesn't refuse its later tokens.
    set_current(AdmissionRequest(deadline=time.monotonic() + LIMIT_S), result)
    async with asyncio.timeout(LIMIT_S):
        results = searched(llm, steps=3, beam_width=4, max_tokens=7)
        assert [len(each.outputs[0].token_ids) async for each in results] == [7]
    # 10 + 7 tokens are two blocks.
    assert script.costs == [4 * 2 * BLOCK] * 12
    stats = batcher.stats
    # Four beams are four records.
    assert (stats.total_completed, stats.running_cost, llm.prompt_tokens) == (4, 0, 10)
    assert result.usage.prompt_tokens == 10
    assert result.usage.output_tokens == 7


async def test_a_beam_search_that_never_fits_is_refused(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    script = Script(output(1, finish="stop"))
    llm = gated(monkeypatch, script, batcher)
    set_current(AdmissionRequest(), AdmissionResult())
    with pytest.raises(RefusedError, match="lower n or max_tokens"):
        await anext(searched(llm, beam_width=9, max_tokens=CONTEXT))
    set_current(AdmissionRequest(max_tokens=4), AdmissionResult())
    assert len((await anext(searched(llm, beam_width=9, max_tokens=CONTEXT))).outputs[0].token_ids) == 4


async def test_one_answer_as_large_as_the_engine_runs_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ContinuousBatcher(capacity=CONTEXT - BLOCK, oversize="alone") as batcher:
        script = Script(output(1, finish="stop"))
        await run(gated(monkeypatch, script, batcher), params=SamplingParams(max_tokens=None))
        assert len(script.calls) == 1


class Core:
    """vLLM's client of its engine's process, which can't send a request after the first `sent`."""

    def __init__(self, sent: int) -> None:
        self.sent = sent
        self.aborted: list[str] = []

    async def add_request_async(self, request: EngineCoreRequest) -> None:
        self.sent -= 1
        if self.sent < 0:
            raise OverflowError("can't serialize ints >= 2**64")

    async def abort_requests_async(self, request_ids: list[str]) -> None:
        self.aborted += request_ids


@pytest.mark.parametrize("answers", [1, 3])
async def test_a_request_that_never_reaches_the_engine_is_forgotten(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher, answers: int
) -> None:
    llm: Any = gated(monkeypatch, Script(), batcher)
    processor = llm.output_processor = OutputProcessor(None, log_stats=False)
    llm.engine_core = Core(sent=answers - 1)
    llm.check_admission = lambda **options: None
    llm.log_requests = False
    params = SamplingParams(n=answers, detokenize=False)

    def request(request_id: str) -> EngineCoreRequest:
        return EngineCoreRequest(
            request_id, [1, 2], None, params, None, 0.0, None, None, None, external_req_id="r"
        )

    parent = ParentRequest(request("parent")) if answers > 1 else None
    queue = RequestOutputCollector(RequestOutputKind.FINAL_ONLY, "r")

    async def add() -> None:
        for index in range(answers):
            name = parent.get_child_info(index)[0] if parent else "alone"
            await llm._add_request(request(name), None, parent, index, queue)

    with pytest.raises(OverflowError):
        await add()
    assert not processor.has_unfinished_requests()
    assert not processor.parent_requests
    # The engine may have got some of them.
    assert len(llm.engine_core.aborted) == answers
