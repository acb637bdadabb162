"""The slots of requests: what their admission depends on, and what they report at their end."""

import asyncio
import time
from collections.abc import AsyncIterator

import pytest
from vllm import SamplingParams
from vllm.sampling_params import RequestOutputKind

from batcher import ContinuousBatcher, Goals
from serve_app.api.scheduling import Scheduling
from serve_app.engine import arrivals as module
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.arrivals import Arrivals
from serve_app.engine.autoscaling import SEQUENCES, autoscaling_stats
from serve_app.engine.vllm.refusal import RefusedError
from tests.serve_app.engine.vllm_doubles import LIMIT_S, TEN, HeldScript, Script, gated, output, run


@pytest.fixture
async def batcher() -> AsyncIterator[ContinuousBatcher]:
    async with ContinuousBatcher(capacity=1024, max_queue_size=1) as batcher:
        yield batcher


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


async def test_goals_count_from_the_arrival_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ContinuousBatcher(capacity=1024, goals=Goals(1.0)) as batcher:
        batcher.step(0.01)
        llm = gated(monkeypatch, Script(output(1, finish="stop")), batcher)
        stream = SamplingParams(max_tokens=4, output_kind=RequestOutputKind.DELTA)
        for _ in range(25):
            set_current(AdmissionRequest(arrived_at=time.monotonic() - 5.0), AdmissionResult())
            await run(llm, params=stream)
        assert batcher.stats.expected_ttft_s is not None
        assert batcher.stats.expected_ttft_s >= 5.0


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


async def test_answers_are_as_many_records_and_a_priority_request_goes_before_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """110 `flex` requests of eight answers: 880 sequences for 256 places."""
    requests, answers, places = 110, 8, 256
    script = HeldScript()
    async with ContinuousBatcher(capacity=1_000_000, max_running=places) as batcher:
        llm = gated(monkeypatch, script, batcher)

        async def ask(name: str, priority: int, n: int) -> None:
            scheduling = Scheduling(priority=priority, tenant=name)
            set_current(AdmissionRequest(scheduling), AdmissionResult())
            async for _ in llm.generate(TEN, SamplingParams(max_tokens=4, n=n), name):
                pass

        tasks = [asyncio.ensure_future(ask("flex", 10, answers)) for _ in range(requests)]
        try:
            await asyncio.sleep(0)
            stats = batcher.stats
            assert (stats.running, len(script.started)) == (places, places // answers)
            assert stats.queue_depth == requests * answers - places
            # The report to the autoscaler has all sequences.
            assert autoscaling_stats(stats)[SEQUENCES] == requests * answers
            tasks.append(asyncio.ensure_future(ask("live", -10, 1)))
            # No place is free: it is the first of those that wait.
            await asyncio.sleep(0)
        finally:
            script.go.set()
            async with asyncio.timeout(LIMIT_S):
                await asyncio.gather(*tasks)
    assert script.started[places // answers] == "live"
    assert batcher.stats.total_completed == requests * answers + 1


@pytest.mark.parametrize(("tenant", "turn"), [("default", 2), ("acme", 20)])
async def test_a_flood_on_an_adapter_holds_up_another_only_within_a_named_tenant(
    monkeypatch: pytest.MonkeyPatch, tenant: str, turn: int
) -> None:
    script = HeldScript()
    async with ContinuousBatcher(capacity=1_000, max_running=1) as batcher:
        llm = gated(monkeypatch, script, batcher)

        async def ask(adapter: str) -> None:
            request = AdmissionRequest(Scheduling(tenant=tenant), adapter=adapter)
            set_current(request, AdmissionResult())
            async for _ in llm.generate(TEN, SamplingParams(max_tokens=4), adapter):
                pass

        tasks = [asyncio.ensure_future(ask("demo:letters")) for _ in range(20)]
        await asyncio.sleep(0)
        tasks.append(asyncio.ensure_future(ask("demo:symbols")))
        await asyncio.sleep(0)
        script.go.set()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*tasks)
    assert script.started.index("demo:symbols") == turn


async def test_more_answers_than_the_engine_runs_at_once_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with ContinuousBatcher(capacity=10_000, places=4, oversize="alone") as batcher:
        llm = gated(monkeypatch, Script(output(1, finish="stop")), batcher)
        set_current(AdmissionRequest(), AdmissionResult())
        with pytest.raises(RefusedError, match="n: 5 answers must start together"):
            await run(llm, params=SamplingParams(max_tokens=4, n=5))
        await run(llm, params=SamplingParams(max_tokens=4, n=4))


async def test_a_request_has_arrived_when_it_asks_for_a_slot(
    monkeypatch: pytest.MonkeyPatch, batcher: ContinuousBatcher
) -> None:
    monkeypatch.setattr(module, "MOST_WAIT_S", LIMIT_S)
    arrivals = Arrivals()
    result = AdmissionResult(arrival=await arrivals.enter(0))
    flex = asyncio.ensure_future(arrivals.enter(1))
    llm = gated(monkeypatch, Script(output(1)), batcher)
    set_current(AdmissionRequest(), result)
    async with batcher.slot(1024):
        waiting = asyncio.ensure_future(run(llm))
        async with asyncio.timeout(LIMIT_S):
            await flex
        assert not waiting.done()
    await waiting
