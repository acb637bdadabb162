"""vLLM's statistics: the tokens of each slot against vLLM's own counters, its steps, and its metrics."""

import asyncio
import contextlib
import logging
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vllm import SamplingParams
from vllm.inputs.engine import tokens_input
from vllm.pooling_params import PoolingParams
from vllm.sampling_params import BeamSearchParams, RequestOutputKind
from vllm.v1.engine import EngineCoreEvent, EngineCoreEventType
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import StatLoggerManager
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from serve_app.engine.job import Job
from serve_app.engine.vllm import stats as vllm_stats
from serve_app.engine.vllm.stats import EngineStats, UnreportedStats, VLLMSequences, own_work, slot_usage
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.rows import LedgerRow
from serve_app.wire.usage import RequestUsage
from tests.batcher.virtual import VirtualLoop, blocked, virtual
from tests.progress import STILL_S
from tests.serve_app.engine.engine_doubles import new_job, opened
from tests.serve_app.engine.vllm_doubles import SteppedEngine, admitted, stepped
from tests.serve_app.ledger.crashing import request_of, total
from tests.serve_app.telemetry.instruments import Instruments

TEN = tokens_input(list(range(10)))
FINAL, DELTA = RequestOutputKind.FINAL_ONLY, RequestOutputKind.DELTA


@pytest.fixture
def book() -> CallBook:
    book = CallBook("demo", "r", "r")
    book.keep_ended()
    return book


class Reservation:
    """Notes what a call is charged."""

    charged = tokens = 0

    def settle(self, tokens: int, *, request: bool) -> None:
        self.charged += tokens

    def written(self) -> None:
        pass


def rows(book: CallBook) -> list[LedgerRow]:
    return [call.row() for call in book.take()]


def counted(book: CallBook, engine: SteppedEngine) -> bool:
    """Return whether the book has what vLLM has counted."""
    _, prompt, cached, output, _ = total(book)
    return (prompt, cached, output) == (engine.prompt, engine.cached, engine.stats.output)


def of_call(call: Call, **facts: Any) -> Job:
    """Return the job of an entry of the ledger."""
    job = new_job(facts=facts)
    job.call, job.usage = call, call.usage
    return job


def begin(llm: Any, call: Call, *, results: int | None = None, **params: Any) -> "asyncio.Task[None]":
    """Run a request as a task.

    Args:
        llm: The client.
        call: Its call, which ends with the task.
        results: Results after which the reader leaves; None: it stays to the end.
        params: Sampling parameters.
    """

    async def ask() -> None:
        sampling = SamplingParams(**({"max_tokens": 50, "output_kind": DELTA, "detokenize": False} | params))
        try:
            await admitted(llm, of_call(call, answers=sampling.n))
            outputs = llm.generate(TEN, sampling, "r")
            async with contextlib.aclosing(outputs):
                seen = 0
                async for _ in outputs:
                    seen += 1
                    if seen == results:
                        return
        finally:
            call.close()

    return asyncio.ensure_future(ask())


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("begin"), st.integers(1, 3), st.sampled_from([DELTA, FINAL])),
        st.tuples(st.just("step"), st.lists(st.booleans(), max_size=8), st.integers(1, 3)),
        st.tuples(st.just("end"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("leave"), st.integers(0, 5), st.just(0)),
        st.tuples(st.just("wait"), st.just(0), st.just(0)),
    ),
    max_size=25,
)


@given(steps=STEPS)
def test_the_book_has_what_vllm_counts_at_any_time(steps: list[tuple[str, Any, Any]]) -> None:
    async def run() -> None:
        book = CallBook("demo", "r", "r")
        book.keep_ended()
        async with opened(capacity=10_000) as site:
            llm, engine = stepped(site)
            tasks: list[asyncio.Task[None]] = []
            seen: list[str] = []
            for action, what, how in steps:
                seen = list(dict.fromkeys([*seen, *engine.running]))
                match action:
                    case "begin":
                        call = book.open(request_of(), RequestUsage())
                        tasks.append(begin(llm, call, n=what, output_kind=how))
                        await blocked()
                    case "step":
                        # Also outputs of sequences that were aborted meanwhile, which vLLM drops.
                        chosen = [name for name, wanted in zip(seen, what, strict=False) if wanted]
                        engine.step(*chosen, tokens=how, cached=4)
                    case "end":
                        engine.step(*engine.running[what : what + 2], finish=True)
                    case "leave" if tasks:
                        tasks.pop(what % len(tasks)).cancel()
                    case "wait":
                        await blocked()
                assert counted(book, engine)
            for task in tasks:
                task.cancel()
            await blocked()
            assert not engine.running
            assert counted(book, engine)
            assert sum(row.output_tokens for row in rows(book)) == engine.stats.output

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        runner.run(run())


@virtual
async def test_tokens_that_no_client_has_got_are_counted(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        task = begin(llm, book.open(request_of(key="ada"), RequestUsage()))
        await blocked()
        engine.step(cached=8)
        await blocked()
        engine.step(tokens=5)
        # Its reader leaves before it gets the five.
        task.cancel()
        await blocked()
        # The engine sends one more, which vLLM drops.
        (row,) = rows(book)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 8, 6)
        assert (row.key, row.outcome) == ("ada", "cancelled")


@virtual
async def test_the_batcher_sees_how_far_an_answer_is_that_comes_as_a_whole(book: CallBook) -> None:
    async with opened(capacity=1_000, policy="max_utilization") as site:
        for _ in range(400):
            async with site.batcher.slot(prompt_tokens=16, max_tokens=50) as slot:
                slot.report(5)
        llm, engine = stepped(site)
        task = begin(llm, book.open(request_of(), RequestUsage()), output_kind=FINAL)
        await blocked()
        waits = site.batcher.slot_nowait(1_000, priority=1)
        before = site.batcher.stats.running_cost
        for _ in range(30):
            engine.step()
            await asyncio.sleep(0.05)
        # No result has come; whatever happens in the batcher has it ask for the tokens.
        async with site.batcher.slot(0):
            pass
        assert site.batcher.stats.running_cost > before + 20
        engine.step(finish=True)
        await task
        assert waits.running
        waits.release()


@virtual
async def test_a_prompt_that_is_aborted_before_its_first_token_is_not_counted(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        task = begin(llm, book.open(request_of(), RequestUsage()))
        await blocked()
        task.cancel()
        await blocked()
        (row,) = rows(book)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (0, 0, 0)
        assert counted(book, engine)


@virtual
async def test_a_slot_has_the_times_of_its_way_to_the_first_token(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        call = book.open(request_of(), RequestUsage())
        task = begin(llm, call)
        await blocked()
        # vLLM's double has a clock of its own, at 1.0 when it sends the first token.
        before = [(EngineCoreEventType.QUEUED, 0.4), (EngineCoreEventType.SCHEDULED, 0.6)]
        engine.step(events=[EngineCoreEvent(kind, at) for kind, at in before])
        await blocked()
        engine.step(finish=True)
        await task
        (slot,) = call.usage.slots
        times = dict(slot.events)
        assert list(times) == ["tokenized", "queued", "scheduled", "first token", "received"]
        assert (times["queued"], times["scheduled"], times["first token"]) == (0.4, 0.6, 1.0)
        assert slot.started_at <= times["tokenized"] <= times["received"] <= slot.ended_at


@virtual
async def test_a_slot_without_a_first_token_has_the_times_before(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, _ = stepped(site)
        call = book.open(request_of(), RequestUsage())
        task = begin(llm, call)
        await blocked()
        task.cancel()
        await blocked()
        (slot,) = call.usage.slots
        assert not slot.events


@pytest.mark.parametrize(("ends", "outcome"), [(True, "ok"), (False, "cancelled")])
@virtual
async def test_a_reader_that_leaves_with_the_last_result_has_it_all(
    book: CallBook, ends: bool, outcome: str
) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        begin(llm, book.open(request_of(), RequestUsage()), results=1)
        await blocked()
        engine.step(finish=ends)
        await blocked()
        assert [row.outcome for row in rows(book)] == [outcome]


@pytest.mark.parametrize(("error", "outcome"), [(EngineDeadError(), "lost"), (ValueError("bad"), "failed")])
@virtual
async def test_a_failure_of_the_engine_is_the_outcome(
    book: CallBook,
    error: Exception,
    outcome: str,
) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        task = begin(llm, book.open(request_of(), RequestUsage()))
        await blocked()
        engine.step()
        engine.processor.propagate_error(error)
        with pytest.raises((EngineDeadError, EngineGenerateError)):
            await task
        assert [(row.outcome, row.output_tokens) for row in rows(book)] == [(outcome, 1)]


@virtual
async def test_the_answers_to_a_prompt_have_it_once(book: CallBook) -> None:
    """For the quota and the ledger, as the `usage` of the answer says."""
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        call = book.open(request_of(), RequestUsage())
        reservation = Reservation()
        call.reservations.append(reservation)
        task = begin(llm, call, n=3, output_kind=FINAL)
        await blocked()
        first, *others = engine.running
        engine.step(first, tokens=2, cached=4)
        assert total(book)[1:4] == (10, 4, 2)
        engine.step(*others, tokens=2, cached=9)
        engine.step(finish=True)
        await task
        (row,) = rows(book)
        assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 9)
        assert reservation.charged == 19
        assert counted(book, engine)


@virtual
async def test_a_beam_search_has_all_that_it_asks_of_the_engine(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        asked = 0

        async def search(*, prompt: Any, params: Any, request_id: str) -> Any:
            nonlocal asked
            for _ in range(3):
                tasks = [asyncio.ensure_future(one(prompt)) for _ in range(params.beam_width)]
                await blocked()
                engine.step(finish=True)
                for task in tasks:
                    async with asyncio.timeout(STILL_S):
                        last = await task
                asked += len(tasks)
            yield last

        async def one(prompt: Any) -> Any:
            params = SamplingParams(max_tokens=1, output_kind=FINAL, detokenize=False)
            return [each async for each in llm.generate(prompt, params, "r")][-1]

        call = book.open(request_of(), RequestUsage())
        await admitted(llm, of_call(call, answers=2))
        params = BeamSearchParams(beam_width=2, max_tokens=3)
        async for _ in llm.beam_search(search, prompt=TEN, params=params, request_id="r"):
            pass
        call.close()
        assert [(row.prompt_tokens, row.output_tokens) for row in rows(book)] == [(10 * asked, asked)]
        assert counted(book, engine)


@virtual
async def test_an_embedding_has_its_prompt(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        call = book.open(request_of(), RequestUsage())

        async def embed() -> None:
            job = await admitted(llm, of_call(call))
            async for _ in llm.encode(TEN, PoolingParams(task="embed"), "r"):
                pass
            call.close()
            assert job.usage.counted.cached == 2

        task = asyncio.ensure_future(embed())
        await blocked()
        engine.step(cached=2, finish=True, output=torch.zeros(3))
        await task
        found = [(row.prompt_tokens, row.cached_tokens, row.output_tokens, row.outcome) for row in rows(book)]
        assert found == [(10, 2, 0, "ok")]


@virtual
async def test_the_usage_of_an_answer_has_the_tokens_from_the_cache(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        job = new_job()

        async def ask() -> None:
            await admitted(llm, job)
            params = SamplingParams(max_tokens=5, output_kind=FINAL, detokenize=False)
            async for _ in llm.generate(TEN, params, "r"):
                pass

        task = asyncio.ensure_future(ask())
        await blocked()
        engine.step(cached=6, finish=True)
        await task
        assert job.usage.counted[:2] == (10, 6)


@virtual
async def test_work_of_the_replica_itself_is_a_call_of_its_own(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)

        async def ask(name: str) -> None:
            params = SamplingParams(output_kind=FINAL, detokenize=False)
            await anext(AsyncLLM.generate(llm, TEN, params, name))

        async def warm_up() -> None:
            with own_work(book):
                await asyncio.gather(ask("a"), ask("b"))
            # The block is over.
            assert slot_usage.get() is None

        task = asyncio.ensure_future(warm_up())
        await blocked()
        engine.step(finish=True)
        await task
        assert [(row.source, row.prompt_tokens, row.output_tokens) for row in rows(book)] == [
            ("warm_up", 20, 2)
        ]
        assert counted(book, engine)


@virtual
async def test_nothing_comes_to_the_engine_without_a_slot() -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        results = AsyncLLM.generate(llm, TEN, SamplingParams(output_kind=FINAL, detokenize=False), "r")
        with pytest.raises(EngineGenerateError) as caught:
            await anext(results)
        assert "without a slot" in str(caught.value.__cause__)
        assert not engine.running


@virtual
async def test_a_task_that_has_outlived_its_slot_asks_nothing_of_the_engine() -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        usage = RequestUsage()
        slot = usage.begin()
        slot.end()
        slot_usage.set(slot)
        with pytest.raises(asyncio.CancelledError):
            await anext(AsyncLLM.generate(llm, TEN, SamplingParams(output_kind=FINAL, detokenize=False), "r"))
        assert not engine.running


@pytest.mark.parametrize("name", ["request_states", "parent_requests"])
@virtual
async def test_a_state_that_has_moved_is_named(name: str) -> None:
    async with opened(capacity=10_000) as site:
        _, engine = stepped(site)
        delattr(engine.processor, name)
        with pytest.raises(RuntimeError, match=name):
            VLLMSequences(engine.processor, "r")


@virtual
async def test_a_client_does_not_state_how_much_of_its_prompt_was_in_the_cache(book: CallBook) -> None:
    async with opened(capacity=10_000) as site:
        llm, engine = stepped(site)
        # A caller that may move KV caches; vLLM believes it for a prompt that another engine has computed.
        llm.transfer_keys = ("",)
        claim = {"do_remote_prefill": True, "remote_prefill_cached_tokens": 1_000_000}
        task = begin(llm, book.open(request_of(), RequestUsage()), extra_args={"kv_transfer_params": claim})
        await blocked()
        engine.step(cached=4, finish=True)
        await task
        assert [(row.prompt_tokens, row.cached_tokens) for row in rows(book)] == [(10, 4)]


def test_each_message_of_the_engine_is_progress_also_without_statistics() -> None:
    stats = UnreportedStats(None)
    stats.record(SchedulerStats(num_running_reqs=1), None)
    stats.record(None, None)
    assert (stats.steps, stats.prompt, stats.output) == (2, 0, 0)


def test_vllm_adds_no_logger_for_prometheus_of_its_own() -> None:
    config: Any = None
    manager = StatLoggerManager(config, custom_stat_loggers=[UnreportedStats], enable_default_loggers=False)
    manager.log_engine_initialized()
    manager.record_sleep_state(1, 1)
    assert [type(each) for each in manager.stat_loggers] == [UnreportedStats]


def test_an_error_ends_a_part_of_the_statistics_and_not_the_engine(
    reported: list[tuple[Any, Any, int]], caplog: pytest.LogCaptureFixture
) -> None:
    stats = EngineStats(None, [0])
    broken: Any = object()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for _ in range(2):
            stats.record(broken, None)
        stats.flush()
    assert reported == []
    assert [(record.message, bool(record.exc_info)) for record in caplog.records] == [
        ("vLLM's statistics fail: their figures are left out from now on", True),
        ("vLLM's statistics fail: their metrics are left out from now on", True),
    ]
    # The watchdog and the counters go on.
    stats.record(*step(1, 2))
    assert (stats.steps, stats.output) == (3, 2)


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, int]]:
    """Values that would have gone to Ray."""
    told: list[tuple[Any, Any, int]] = []

    def record(
        self: object, scheduler: Any, iteration: Any, mm_cache: object = None, engine: int = 0
    ) -> None:
        told.append((scheduler, iteration, engine))

    monkeypatch.setattr(RayPrometheusStatLogger, "__init__", init)
    monkeypatch.setattr(RayPrometheusStatLogger, "record", record)
    return told


def init(self: Any, config: object, indexes: list[int]) -> None:
    """Make what vLLM makes of its histograms, among them one that isn't kept."""
    for name in (*vllm_stats.HISTOGRAMS, "histogram_queue_time_request"):
        histogram = self._histogram_cls(f"vllm:{name}", "", ["model_name", "engine"], [1, 2.5])
        setattr(self, name, {index: histogram.labels("m", str(index)) for index in indexes})


def step(running: int, tokens: int) -> tuple[SchedulerStats, IterationStats]:
    """Return what vLLM reports of a step."""
    scheduler = SchedulerStats(num_running_reqs=running)
    scheduler.prefix_cache_stats.queries = 10
    scheduler.prefix_cache_stats.hits = 4
    iteration = IterationStats()
    iteration.num_generation_tokens = tokens
    iteration.prompt_token_stats.total = iteration.prompt_token_stats.computed = 7
    iteration.time_to_first_tokens_iter = [0.5]
    iteration.inter_token_latencies_iter = [0.1] * tokens
    return scheduler, iteration


def test_steps_are_added_up_and_reported_together(reported: list[tuple[Any, Any, int]]) -> None:
    metrics = EngineStats(None, [0])
    steps = [step(3, 2), step(4, 3)]
    for scheduler, iteration in steps:
        metrics.record(scheduler, iteration)
    metrics.record(SchedulerStats(num_running_reqs=1), None)
    assert reported == []
    metrics.flush()
    ((scheduler, total, engine),) = reported
    assert (scheduler.num_running_reqs, engine) == (1, 0)
    assert (scheduler.prefix_cache_stats.queries, scheduler.prefix_cache_stats.hits) == (20, 8)
    assert total.num_generation_tokens == 5
    assert total.num_prompt_tokens == 14
    assert total.time_to_first_tokens_iter == [0.5, 0.5]
    assert total.inter_token_latencies_iter == []
    # Other loggers get the same objects.
    assert steps[0][1].time_to_first_tokens_iter == [0.5]
    assert steps[0][0].prefix_cache_stats.queries == 10


def test_gauges_are_reported_again_and_counts_once(
    reported: list[tuple[Any, Any, int]],
) -> None:
    metrics = EngineStats(None, [0])
    metrics.record(*step(3, 2))
    metrics.flush()
    metrics.flush()
    scheduler, iteration, _ = reported[1]
    assert scheduler.num_running_reqs == 3
    assert scheduler.prefix_cache_stats.queries == 0
    assert iteration is None


def test_each_engine_has_series_of_its_own(reported: list[tuple[Any, Any, int]]) -> None:
    metrics = EngineStats(None, [0, 1])
    metrics.record(*step(3, 2), engine_idx=1)
    metrics.flush()
    assert [(scheduler.num_running_reqs, engine) for scheduler, _, engine in reported] == [(0, 0), (3, 1)]


def test_statistics_that_can_not_be_added_up_are_reported_at_once(
    reported: list[tuple[Any, Any, int]],
) -> None:
    metrics = EngineStats(None, [0])
    scheduler, iteration = step(3, 2)
    scheduler.kv_connector_stats = {"some": "thing"}
    metrics.record(scheduler, iteration)
    metrics.flush()
    assert [told.kv_connector_stats for told, _, _ in reported] == [{"some": "thing"}, None]


def test_values_that_are_never_flushed_are_bounded(
    reported: list[tuple[Any, Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_stats, "MAX_PENDING", 3)
    metrics = EngineStats(None, [0])
    for _ in range(7):
        scheduler, iteration = step(1, 1)
        iteration.finished_requests = [object()]
        metrics.record(scheduler, iteration)
    assert [len(total.finished_requests) for _, total, _ in reported] == [3, 3]


def test_only_the_histograms_of_the_dashboard_are_kept(
    reported: list[tuple[Any, Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instruments = Instruments()
    monkeypatch.setattr(vllm_stats, "_gauge", instruments.make)
    metrics = EngineStats(None, [0, 1])
    first_token = metrics.histogram_time_to_first_token
    observed: list[list[float]] = [[0.5, 2, 2.5, 9], [3]]
    for index, values in enumerate(observed):
        for value in values:
            first_token[index].observe(value)
            metrics.histogram_queue_time_request[index].observe(value)
    metrics.flush()
    name = "vllm:histogram_time_to_first_token"
    assert {(series, *labels): values for (series, labels), values in instruments.values.items()} == {
        (f"{name}_bucket", "m", "0", "1.0"): [1],
        (f"{name}_bucket", "m", "0", "2.5"): [3],
        (f"{name}_bucket", "m", "0", "+Inf"): [4],
        (f"{name}_sum", "m", "0"): [14],
        (f"{name}_count", "m", "0"): [4],
        (f"{name}_bucket", "m", "1", "1.0"): [0],
        (f"{name}_bucket", "m", "1", "2.5"): [0],
        (f"{name}_bucket", "m", "1", "+Inf"): [1],
        (f"{name}_sum", "m", "1"): [3],
        (f"{name}_count", "m", "1"): [1],
    }


@pytest.mark.parametrize(("usage", "expected"), [(0.5, []), (0.97, [3])], ids=["for a place", "for blocks"])
def test_preemptions_with_a_full_cache_are_told(
    reported: list[tuple[Any, Any, int]], usage: float, expected: list[int]
) -> None:
    told: list[int] = []
    stats = EngineStats(None, [0])
    stats.preempted = told.append
    scheduler, iteration = step(3, 2)
    scheduler.kv_cache_usage, iteration.num_preempted_reqs = usage, 3
    stats.record(scheduler, iteration)
    stats.record(*step(3, 2))
    assert told == expected
