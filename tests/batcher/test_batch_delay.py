"""How long a partial batch waits for others."""

import asyncio
from typing import Any

import pytest

from batcher import DynamicBatcher
from tests.batcher.helpers import Machine, dynamic_batcher, results_of
from tests.batcher.virtual import blocked, now, virtual
from tests.fakes.clock import Clock


async def burst(batcher: DynamicBatcher[Any, Any], count: int, gap: float) -> None:
    futures = []
    for i in range(count):
        futures.append(await batcher.submit(i))
        await asyncio.sleep(gap)
    await results_of(futures)
    await asyncio.sleep(1)


async def sizes_of_bursts(count: int, seconds: float = 0.4, gap: float = 0.002, **settings: Any) -> list[int]:
    """Return the sizes of the batches of some bursts of ten records.

    Args:
        count: The bursts.
        seconds: The time of a batch.
        gap: Seconds between two records of a burst.
        settings: Those of the batcher.
    """
    machine = Machine(seconds)
    async with dynamic_batcher(machine, **settings) as batcher:
        for _ in range(count):
            await burst(batcher, 10, gap)
    return machine.sizes


@virtual
async def test_a_batch_waits_for_others_once_it_has_learned_that_they_come() -> None:
    assert await sizes_of_bursts(4) == [1, 9, 10, 10, 10]


@virtual
async def test_it_stops_waiting_when_others_no_longer_come() -> None:
    machine = Machine(0.4)
    async with dynamic_batcher(machine) as batcher:
        for _ in range(4):
            await burst(batcher, 10, 0.002)
        latencies = []
        for _ in range(20):
            before = now()
            await (await batcher.submit("lone"))
            latencies.append(now() - before)
        assert latencies[0] == pytest.approx(0.45)
        assert latencies[14:] == pytest.approx([0.4] * 6)


@virtual
async def test_waiting_for_others_ends_at_the_timeout() -> None:
    assert await sizes_of_bursts(3, batch_timeout_s=0.005) == [1, 9, 3, 7, 3, 7]


@virtual
async def test_waiting_for_others_takes_a_quarter_of_a_batch_at_most() -> None:
    assert await sizes_of_bursts(3, 0.04, 0.004, batch_timeout_s=60.0) == [1, 9, 3, 7, 3, 7]


@virtual
async def test_a_batch_does_not_wait_for_few_when_many_are_there() -> None:
    machine = Machine(0.4)

    async def crowd(batcher: DynamicBatcher[Any, Any]) -> None:
        futures = [await batcher.submit(i) for i in range(50)]
        await asyncio.sleep(0.01)
        futures.append(await batcher.submit("follower"))
        await results_of(futures)
        await asyncio.sleep(1)

    async with dynamic_batcher(machine) as batcher:
        for _ in range(5):
            await crowd(batcher)
    assert machine.sizes == [50, 1] * 5


@virtual
async def test_a_timeout_of_zero_never_waits() -> None:
    machine = Machine(10.0)
    async with dynamic_batcher(machine, batch_timeout_s=0.0, min_batch_size=5) as batcher:
        before = now()
        await (await batcher.submit("a"))
        assert now() - before == pytest.approx(10.0)


@virtual
async def test_min_batch_size_holds_a_batch_back_until_the_timeout() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, min_batch_size=3, batch_timeout_s=0.5) as batcher:
        future = await batcher.submit("lone")
        await future
        assert machine.starts == [pytest.approx(0.5, abs=0.01)]
        futures = [await batcher.submit("one"), await batcher.submit("two")]
        await asyncio.sleep(0.1)
        assert len(machine.batches) == 1
        futures.append(await batcher.submit("three"))
        await blocked()
        await results_of(futures)
    assert machine.sizes == [1, 3]
    assert machine.starts[1] < 1.7


@virtual
async def test_what_a_full_batch_leaves_over_is_looked_at_anew() -> None:
    machine = Machine(0.1)
    async with dynamic_batcher(machine, max_batch_size=4, min_batch_size=2, batch_timeout_s=10) as batcher:
        futures = [await batcher.submit("first")]
        await asyncio.sleep(1.0)
        futures += await batcher.submit_batch(range(6))
        await results_of(futures)
    assert machine.sizes == [4, 3]
    assert machine.starts == pytest.approx([1.0, 1.1], abs=0.01)


@virtual
async def test_min_batch_size_counts_from_the_oldest_record_left_over() -> None:
    machine = Machine(0.1)
    async with dynamic_batcher(machine, max_batch_size=4, min_batch_size=2, batch_timeout_s=0.5) as batcher:
        futures = [await batcher.submit(i) for i in range(5)]
        await results_of(futures)
    assert machine.sizes == [4, 1]
    assert machine.starts[1] == pytest.approx(0.5, abs=0.01)


class Ticking(Clock):
    """A clock on which each look takes a moment."""

    def __call__(self) -> float:
        self.now += 0.0005
        return self.now


async def test_a_record_in_each_pass_of_the_loop_does_not_hold_up_the_first_batch() -> None:
    clock = Ticking()
    starts: list[float] = []

    async def process(batch: list[int]) -> list[int]:
        starts.append(clock.now)
        return batch

    async with DynamicBatcher(process, batch_timeout_s=0.02, clock=clock) as batcher:
        futures = []
        for number in range(200):
            futures.append(batcher.submit_nowait(number))
            await asyncio.sleep(0)
        await asyncio.gather(*futures)
    assert starts[0] <= 0.03


@pytest.mark.parametrize("callers", [1, 2])
async def test_records_that_come_and_are_cancelled_do_not_hold_up_a_lone_one(callers: int) -> None:
    clock = Ticking()

    async def process(batch: list[int]) -> list[int]:
        return batch

    async with DynamicBatcher(process, batch_timeout_s=0.02, clock=clock) as batcher:
        lone = batcher.submit_nowait(1)

        async def come_and_go() -> None:
            for _ in range(200):
                batcher.submit_nowait(2).cancel()
                await asyncio.sleep(0)
                if lone.done():
                    break

        await asyncio.gather(*(come_and_go() for _ in range(callers)))
        assert clock.now <= 0.03
