"""`DynamicBatcher.map`: any number of records in bounded memory."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

from batcher import Closed, Expired, Oversize
from tests.batcher.helpers import Machine, check_books, dynamic_batcher
from tests.batcher.virtual import now, virtual


async def collect(results: AsyncIterator[Any], got: list[Any]) -> None:
    async for result in results:
        got.append(result)


async def numbers(count: int) -> AsyncIterator[int]:
    for i in range(count):
        yield i


@virtual
async def test_map_yields_results_in_order() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, max_batch_size=8) as batcher:
        assert [result async for result in batcher.map(range(30))] == [f"<{i}>" for i in range(30)]
        assert [result async for result in batcher.map(numbers(30))] == [f"<{i}>" for i in range(30)]
        assert [result async for result in batcher.map([])] == []


@virtual
async def test_map_yields_results_as_they_come() -> None:
    async def process(batch: list[int]) -> list[int]:
        await asyncio.sleep(100 - 10 * batch[0])
        return batch

    async with dynamic_batcher(process, max_batch_size=1, max_concurrent_batches=4) as batcher:
        assert [result async for result in batcher.map(range(4), ordered=False)] == [3, 2, 1, 0]
        assert [result async for result in batcher.map(range(4))] == [0, 1, 2, 3]


@virtual
@pytest.mark.parametrize("ordered", [True, False])
async def test_map_reads_no_further_than_it_must(ordered: bool) -> None:
    read = 0

    def source() -> Iterator[int]:
        nonlocal read
        for i in range(1000):
            read = i + 1
            yield i

    async with dynamic_batcher(Machine(), max_batch_size=4) as batcher:
        taken = 0
        async for _ in batcher.map(source(), ordered=ordered, max_pending=16):
            taken += 1
            assert read - taken <= 17
    assert taken == 1000


@virtual
async def test_map_yields_what_is_done_while_its_source_is_slow() -> None:
    async def slow() -> AsyncIterator[int]:
        for i in range(3):
            yield i
            await asyncio.sleep(100)

    async with dynamic_batcher(Machine()) as batcher:
        times = [round(now()) async for _ in batcher.map(slow())]
    assert times == [1, 101, 201]


@virtual
async def test_map_ends_at_the_first_error_or_yields_it() -> None:
    async def process(batch: list[int]) -> list[Any]:
        await asyncio.sleep(1)
        return [ValueError(record) if record == 5 else record for record in batch]

    async with dynamic_batcher(process, max_batch_size=4, target_batch_cost=4, oversize="reject") as batcher:
        got: list[Any] = []
        with pytest.raises(ValueError, match="5"):
            await collect(batcher.map(range(100), max_pending=8), got)
        assert got == [0, 1, 2, 3, 4]
        await asyncio.sleep(10)
        check_books(batcher)
        assert batcher.stats.total_submitted < 20
        results = [result async for result in batcher.map(range(8), return_exceptions=True)]
        assert [repr(result) for result in results[4:7]] == ["4", "ValueError(5)", "6"]


@virtual
async def test_map_yields_the_refusal_of_a_record_in_its_place() -> None:
    async with dynamic_batcher(
        Machine(), cost_estimator=len, target_batch_cost=4, oversize="reject"
    ) as batcher:
        results = [
            result async for result in batcher.map(["a", "much too long", "b"], return_exceptions=True)
        ]
    assert [type(result) for result in results] == [str, Oversize, str]


@virtual
async def test_map_gives_each_record_the_time_to_start_that_submit_would() -> None:
    async with dynamic_batcher(Machine(seconds=1.0), max_batch_size=2, batch_timeout_s=0.0) as batcher:
        results = [
            result async for result in batcher.map("abcdef", return_exceptions=True, timeout=1.5, tenant="t")
        ]
    assert [type(result) for result in results] == [str] * 4 + [Expired] * 2


@virtual
async def test_map_raises_what_its_source_raises() -> None:
    def source() -> Iterator[int]:
        yield 1
        raise OSError("no more")

    async with dynamic_batcher(Machine()) as batcher:
        got: list[Any] = []
        with pytest.raises(OSError, match="no more"):
            await collect(batcher.map(source()), got)
        assert got == ["<1>"]


@virtual
async def test_leaving_a_map_cancels_what_it_submitted() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, max_batch_size=2, max_queue_size=5) as batcher:
        results = batcher.map(range(100))
        assert await anext(results) == "<0>"
        await results.aclose()
        assert batcher.stats.total_cancelled >= 3
        await asyncio.sleep(10)
        assert len(machine.batches) <= 2
        check_books(batcher)


@virtual
async def test_map_ends_when_the_batcher_stops() -> None:
    batcher = dynamic_batcher(Machine(), max_batch_size=1, max_queue_size=3)
    await batcher.start()

    async def consume() -> None:
        async for _ in batcher.map(range(1000), return_exceptions=True):
            pass

    task = asyncio.create_task(consume())
    await asyncio.sleep(5)
    await batcher.stop()
    with pytest.raises(Closed):
        await task
