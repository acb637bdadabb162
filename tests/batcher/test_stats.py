"""Statistics: figures that are right and explained, and observations of single records."""

import asyncio
import dataclasses
import json
import re
from pathlib import Path

import pytest

from batcher import (
    BatchObservation,
    BatchStats,
    ContinuousBatcher,
    ContinuousStats,
    DynamicBatcher,
    Observation,
    Stats,
)
from batcher.stats import Recorder, percentiles
from tests.batcher.helpers import dynamic_batcher, refusing_bad, results_of
from tests.batcher.virtual import virtual
from tests.fakes.clock import Clock


def test_percentiles_by_nearest_rank() -> None:
    assert percentiles([], (0.5, 0.99)) == [0.0, 0.0]
    assert percentiles([7.0], (0.0, 0.5, 1.0)) == [7.0, 7.0, 7.0]
    assert percentiles(range(100, 0, -1), (0.5, 0.9, 0.99)) == [51, 91, 100]


def test_time_is_busy_or_idle_only_while_open() -> None:
    recorder = Recorder()

    def times(now: float) -> tuple[float, float]:
        found = recorder.common(now)
        return found["busy_time_s"], found["idle_time_s"]

    recorder.switch(True, 5.0)
    recorder.switch(False, 9.0)
    assert times(9.0) == (0.0, 0.0)
    recorder.open(10.0)
    recorder.switch(True, 11.0)
    assert times(13.0) == (2.0, 1.0)
    recorder.switch(False, 14.0)
    recorder.close(15.0)
    assert times(99.0) == (3.0, 2.0)
    recorder.open(100.0)
    assert times(101.0) == (3.0, 3.0)


async def test_first_tokens_are_timed_from_submission_for_records_that_tell_them() -> None:
    now = 10.0
    async with ContinuousBatcher(capacity=100, clock=lambda: now) as batcher:
        async with batcher.slot(prompt_tokens=10, max_tokens=10) as slot:
            slot.report(3)
        assert (batcher.stats.ttft_p50_s, batcher.stats.ttft_p99_s) == (None, None)
        for seconds in (1.0, 3.0, 2.0):
            async with batcher.slot(prompt_tokens=10, max_tokens=10) as slot:
                now += seconds
                slot.first_token()
                now += 50.0
                # The second piece of a stream is no first token.
                slot.first_token()
        assert (batcher.stats.ttft_p50_s, batcher.stats.ttft_p99_s) == (2.0, 3.0)


def test_snapshots_are_plain_data() -> None:
    for stats in (BatchStats(total_batches=3), ContinuousStats(capacity=5)):
        assert json.loads(json.dumps(dataclasses.asdict(stats)))["total_submitted"] == 0


@pytest.mark.parametrize("kind", [BatchStats, ContinuousStats])
def test_the_manual_says_what_each_figure_is(kind: type[Stats]) -> None:
    manual = (Path(__file__).parents[2] / "batcher" / "README.md").read_text().split("\n## Statistics\n")[1]
    assert {field.name for field in dataclasses.fields(kind)} <= set(re.findall(r"`(\w+)`", manual))


@virtual
async def test_the_mean_latency_is_that_of_completed_records() -> None:
    async with dynamic_batcher(refusing_bad, max_batch_size=4, on_error="fail") as batcher:
        await results_of([batcher.submit_nowait("good")])
        await results_of([batcher.submit_nowait("bad") for _ in range(4)])
        assert batcher.stats.avg_latency_s == pytest.approx(1.0)


@virtual
async def test_the_mean_run_is_that_of_each_run_and_the_percentiles_are_of_the_last_ones() -> None:
    async def process(batch: list[str]) -> list[str]:
        await asyncio.sleep(len(batch))
        if "bad" in batch:
            raise ValueError
        return batch

    async with dynamic_batcher(process) as batcher:
        await results_of([batcher.submit_nowait(record) for record in ("bad", "good")])
        stats = batcher.stats
        # Both ran for two seconds, and each for one more.
        assert (stats.avg_run_s, stats.run_p99_s) == pytest.approx((1.5, 1.0))
        assert stats.wait_p50_s == pytest.approx(3.0)
        assert stats.total_batches == 3


async def test_tokens_count_however_the_cost_of_a_slot_was_given() -> None:
    async with ContinuousBatcher(capacity=100) as batcher:
        async with batcher.slot(10) as slot:
            slot.report(7)
        async with batcher.slot(prompt_tokens=5, max_tokens=5) as slot:
            slot.report(3)
        assert batcher.stats.output_tokens == 10


# Observations


async def test_the_oldest_observations_give_way_to_the_latest() -> None:
    async with ContinuousBatcher(capacity=10) as batcher:
        observed = batcher.observe(limit=2)
        for tenant in ("a", "b", "c"):
            async with batcher.slot(1, tenant=tenant):
                pass
        assert [record.tenant for record in observed.records] == ["b", "c"]


async def test_a_slot_is_observed_when_it_is_left() -> None:
    clock = Clock()
    async with ContinuousBatcher(capacity=100, clock=clock) as batcher:
        observed = batcher.observe()
        async with batcher.slot(prompt_tokens=30, max_tokens=70, tenant="a", priority=1) as slot:
            waiting = asyncio.ensure_future(batcher.submit(work, None, cost=5, tenant="b"))
            await asyncio.sleep(0)
            clock.now = 2.0
            slot.report(12)
            assert not observed.records
        await (await waiting)
        assert list(observed.records) == [
            Observation("a", 1, 42, 0.0, 2.0, "completed"),
            Observation("b", 0, 5, 2.0, 0.0, "completed"),
        ]


async def work(record: object) -> object:
    return record


@pytest.mark.parametrize(
    ("error", "outcome"), [(ValueError, "failed"), (asyncio.CancelledError, "cancelled")]
)
async def test_a_slot_says_how_it_ended(error: type[BaseException], outcome: str) -> None:
    async with ContinuousBatcher(capacity=100) as batcher:
        observed = batcher.observe()
        with pytest.raises(error):
            async with batcher.slot(5):
                raise error
        (record,) = observed.records
        assert record.outcome == outcome


async def test_a_batch_and_its_records_are_observed() -> None:
    async def process(batch: list[str]) -> list[object]:
        return [ValueError(record) if record == "bad" else record for record in batch]

    clock = Clock()
    async with DynamicBatcher(process, cost_estimator=len, clock=clock) as batcher:
        observed = batcher.observe()
        tickets = await batcher.submit_batch(["good", "bad"], tenant="a", priority=-1)
        await asyncio.wait(tickets)
        assert [ticket.exception() is None for ticket in tickets] == [True, False]
        assert list(observed.batches) == [BatchObservation(2, 7)]
        assert list(observed.records) == [
            Observation("a", -1, 4, 0.0, 0.0, "completed"),
            Observation("a", -1, 3, 0.0, 0.0, "failed"),
        ]
        assert batcher.stats.total_padded_cost == 8


async def test_records_that_wait_are_counted_by_class() -> None:
    async with ContinuousBatcher(capacity=10) as batcher:
        async with batcher.slot(10):
            tasks = [await batcher.submit(work, None, cost=cost, priority=cost % 2) for cost in (1, 2, 3)]
            assert batcher.stats.queue_classes == {0: (1, 2), 1: (2, 4)}
        await asyncio.gather(*tasks)
        assert batcher.stats.queue_classes == {}


async def test_batches_that_are_decided_ahead_still_wait() -> None:
    free = asyncio.Event()

    async def process(batch: list[int]) -> list[int]:
        await free.wait()
        return batch

    async with DynamicBatcher(process, max_batch_size=2, prefetch_batches=1) as batcher:
        tickets = await batcher.submit_batch(range(5), priority=1)
        await asyncio.sleep(0)
        stats = batcher.stats
        assert stats.queue_classes == {1: (stats.queue_depth, stats.queue_cost)} == {1: (3, 3)}
        free.set()
        await asyncio.wait(tickets)
