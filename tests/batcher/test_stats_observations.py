"""What both batchers keep of each record that has run."""

import asyncio

import pytest

from batcher import BatchObservation, ContinuousBatcher, DynamicBatcher, Observation


class Clock:
    """Time that passes when the test says so."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def test_what_nobody_takes_gives_way_to_the_latest() -> None:
    batcher = ContinuousBatcher(capacity=10)
    kept = batcher.observe(limit=2).records
    for tenant in ("a", "b", "c"):
        kept.append(Observation(tenant, 0, 1, 0.0, 0.0, "completed"))
    assert [record.tenant for record in kept.take()] == ["b", "c"]
    assert kept.take() == []


async def test_a_slot_is_observed_when_it_is_left() -> None:
    clock = Clock()
    async with ContinuousBatcher(capacity=100, clock=clock) as batcher:
        observed = batcher.observe()
        async with batcher.slot(prompt_tokens=30, max_tokens=70, tenant="a", priority=1) as slot:
            waiting = asyncio.ensure_future(batcher.submit(work, None, cost=5, tenant="b"))
            await asyncio.sleep(0)
            clock.now = 2.0
            slot.report(12)
            assert observed.records.take() == []
        await (await waiting)
        assert observed.records.take() == [
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
        (record,) = observed.records.take()
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
        assert observed.batches.take() == [BatchObservation(2, 7)]
        assert observed.records.take() == [
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
