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
from vllm.v1.engine import FinishReason
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError
from vllm.v1.metrics.loggers import PerEngineStatLoggerAdapter
from vllm.v1.metrics.stats import FinishedRequestStats, IterationStats, PrefixCacheStats, SchedulerStats
from vllm.v1.spec_decode.metrics import SpecDecodingStats

from serve_app.engine.job import Job
from serve_app.engine.vllm.stats import EngineStats, own_work, slot_usage
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.rows import LedgerRow
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
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
async def test_a_beam_search_has_its_prompt_once_and_all_that_it_samples(book: CallBook) -> None:
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
        assert [(row.prompt_tokens, row.output_tokens) for row in rows(book)] == [(10, asked)]
        assert engine.stats.output == asked


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


@pytest.fixture
def instruments() -> Instruments:
    return Instruments()


@pytest.fixture
def measured(instruments: Instruments) -> EngineStats:
    """Statistics whose metrics go to `instruments`."""
    return EngineStats("m", Meters(catalogue.VLLM, instruments.make))


def message(running: int, tokens: int) -> tuple[SchedulerStats, IterationStats]:
    """Return what vLLM reports of a step."""
    scheduler = SchedulerStats(num_running_reqs=running, num_waiting_reqs=1, num_skipped_waiting_reqs=2)
    scheduler.prefix_cache_stats.queries, scheduler.prefix_cache_stats.hits = 10, 4
    iteration = IterationStats()
    iteration.num_generation_tokens = tokens
    iteration.prompt_token_stats.total = iteration.prompt_token_stats.computed = 7
    iteration.time_to_first_tokens_iter = [0.5]
    iteration.finished_requests = [
        FinishedRequestStats(FinishReason.STOP, e2e_latency=2.0, mean_time_per_output_token=0.1)
    ]
    return scheduler, iteration


def test_each_message_of_the_engine_is_progress_also_without_statistics() -> None:
    stats = EngineStats("m")
    stats.record(SchedulerStats(num_running_reqs=1), None)
    stats.record(None, None)
    stats.report()
    assert (stats.steps, stats.prompt, stats.output) == (2, 0, 0)


def test_vllm_calls_one_logger_for_its_statistics() -> None:
    stats = EngineStats("m")
    config: Any = None
    adapter = PerEngineStatLoggerAdapter(config, [0], stats.join)
    adapter.log_engine_initialized()
    adapter.record_sleep_state(1, 1)
    adapter.record_admission_rejection("max_num_queued_reqs")
    adapter.record(*message(1, 2))
    assert (stats.steps, stats.prompt, stats.output) == (1, 7, 2)


def test_an_error_ends_a_part_of_the_statistics_and_not_the_engine(
    caplog: pytest.LogCaptureFixture,
) -> None:
    stats = EngineStats("m")
    broken: Any = object()
    with caplog.at_level(logging.ERROR, "ray.serve"):
        for _ in range(2):
            stats.record(broken, None)
        stats.report()
    assert [(record.message, bool(record.exc_info)) for record in caplog.records] == [
        ("vLLM's statistics fail: their figures are left out from now on", True),
    ]
    # The watchdog and the counters go on.
    stats.record(*message(1, 2))
    assert (stats.steps, stats.output) == (3, 2)


def test_steps_are_counted_and_reported_together(instruments: Instruments, measured: EngineStats) -> None:
    for running, tokens in ((3, 2), (4, 3)):
        measured.record(*message(running, tokens))
    measured.record(SchedulerStats(num_running_reqs=1, kv_cache_usage=0.5), None)
    assert instruments.of(catalogue.VLLM_FIRST_TOKEN, "m") == [0.5, 0.5]
    assert instruments.of(catalogue.VLLM_PER_TOKEN, "m") == [0.1, 0.1]
    assert instruments.of(catalogue.VLLM_SECONDS, "m") == [2.0, 2.0]
    assert len(instruments.values) == 3
    # A gauge that isn't set again would vanish, and a counter would count twice.
    measured.report()
    measured.report()
    assert instruments.of(catalogue.VLLM_RUNNING, "m") == [1, 1]
    assert instruments.of(catalogue.VLLM_WAITING, "m") == [0, 0]
    assert instruments.of(catalogue.VLLM_CACHE_USED, "m") == [0.5, 0.5]
    totals = {
        catalogue.VLLM_PROMPT_TOKENS: 14,
        catalogue.VLLM_OUTPUT_TOKENS: 5,
        catalogue.VLLM_CACHE_QUERIES: 20,
        catalogue.VLLM_CACHE_HITS: 8,
    }
    assert {metric: instruments.total(metric, "m") for metric in totals} == totals


def test_drafts_and_hits_of_connectors_are_counted(instruments: Instruments, measured: EngineStats) -> None:
    drafts = SpecDecodingStats.new(4)
    drafts.observe_draft(4, 3)
    drafts.observe_draft(2, 0)
    found = PrefixCacheStats(queries=100, hits=60)
    scheduler = SchedulerStats(spec_decoding_stats=drafts, connector_prefix_cache_stats=found)
    for _ in range(2):
        measured.record(scheduler, None)
    measured.report()
    totals = {
        catalogue.VLLM_DRAFTS: 4,
        catalogue.VLLM_DRAFT_TOKENS: 12,
        catalogue.VLLM_ACCEPTED_TOKENS: 6,
        catalogue.VLLM_EXTERNAL_QUERIES: 200,
        catalogue.VLLM_EXTERNAL_HITS: 120,
    }
    assert {metric: instruments.total(metric, "m") for metric in totals} == totals


@pytest.mark.parametrize(("usage", "expected"), [(0.5, []), (0.97, [3])], ids=["for a place", "for blocks"])
def test_preemptions_with_a_full_cache_are_told(usage: float, expected: list[int]) -> None:
    told: list[int] = []
    stats = EngineStats("m")
    stats.preempted = told.append
    scheduler, iteration = message(3, 2)
    scheduler.kv_cache_usage, iteration.num_preempted_reqs = usage, 3
    stats.record(scheduler, iteration)
    stats.record(*message(3, 2))
    assert told == expected
