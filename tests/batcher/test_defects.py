"""What other batchers get wrong, one test each, by the name of the defect.

The first part is about the library whose interface `DynamicBatcher` keeps, the second about Ray Serve's
`@serve.batch`.
"""

import asyncio
import sys
import time
from collections import deque
from typing import Any

import pytest

from batcher import DynamicBatcher
from tests.batcher.helpers import dynamic_batcher
from tests.batcher.virtual import blocked, now, virtual


class Model:
    """A process function that takes `seconds` per batch and remembers the batches."""

    def __init__(self, seconds: float = 0.3) -> None:
        self.seconds = seconds
        self.batches: list[list[Any]] = []
        self.in_flight = 0
        self.most_in_flight = 0

    async def __call__(self, batch: list[Any]) -> list[Any]:
        self.batches.append(list(batch))
        self.in_flight += 1
        self.most_in_flight = max(self.most_in_flight, self.in_flight)
        await asyncio.sleep(self.seconds)
        self.in_flight -= 1
        return batch


@virtual
async def test_a_batch_overshoots_its_budget() -> None:
    model = Model()
    async with dynamic_batcher(model, target_batch_cost=100) as batcher:
        futures = [await batcher.submit(cost, estimated_cost=cost) for cost in (99, 5000, 1)]
        await asyncio.gather(*futures)
    assert model.batches == [[99], [5000], [1]]


@virtual
async def test_a_lone_record_under_min_batch_size_never_runs() -> None:
    async with dynamic_batcher(Model(), min_batch_size=4) as batcher:
        async with asyncio.timeout(1):
            assert await (await batcher.submit("lone")) == "lone"


@virtual
async def test_putting_back_into_its_own_full_queue_deadlocks() -> None:
    async with dynamic_batcher(Model(), min_batch_size=8, max_batch_size=8, max_queue_size=8) as batcher:
        async with asyncio.timeout(20):
            results = [result async for result in batcher.map(range(40), max_pending=30)]
    assert results == list(range(40))


@virtual
async def test_only_one_batch_is_in_flight() -> None:
    model = Model()
    async with dynamic_batcher(model, max_batch_size=1, max_concurrent_batches=4) as batcher:
        await asyncio.gather(*(await batcher.submit_batch(range(8))))
    assert model.most_in_flight == 4


@virtual
async def test_partial_batches_are_frozen_early() -> None:
    model = Model(0.3)
    async with dynamic_batcher(model, max_batch_size=64, batch_timeout_s=0.02) as batcher:
        futures = []
        for i in range(100):
            futures.append(await batcher.submit(i))
            await asyncio.sleep(1 / 200)
        await asyncio.gather(*futures)
        assert now() <= 0.95
    assert len(model.batches) <= 4


@virtual
async def test_a_lone_request_on_an_idle_batcher_waits_the_whole_timeout() -> None:
    async with dynamic_batcher(Model(0.3)) as batcher:
        for _ in range(10):
            before = now()
            await (await batcher.submit("x"))
            assert now() - before < 0.3 + 0.001
            await asyncio.sleep(1)


@virtual
async def test_a_cancelled_error_in_the_function_kills_the_loop() -> None:
    async def process(batch: list[str]) -> list[str]:
        if "bad" in batch:
            raise asyncio.CancelledError
        return batch

    async with dynamic_batcher(process) as batcher:
        bad = await batcher.submit("bad")
        with pytest.raises(RuntimeError, match="cancelled from inside"):
            await bad
        assert batcher.is_running
        assert await (await batcher.submit("good")) == "good"


@virtual
async def test_cancelled_records_are_still_run() -> None:
    model = Model()
    async with dynamic_batcher(model) as batcher:
        futures = [await batcher.submit(i) for i in range(4)]
        futures[0].cancel()
        await blocked()
        futures += [await batcher.submit(i) for i in range(4, 8)]
        futures[5].cancel()
        await asyncio.gather(*futures, return_exceptions=True)
    assert model.batches == [[1, 2, 3], [4, 6, 7]]


@virtual
async def test_a_poison_record_fails_its_whole_batch_with_one_shared_error() -> None:
    async def process(batch: list[int]) -> list[int]:
        if {3, 5} & set(batch):
            raise ValueError("poison")
        return batch

    async with dynamic_batcher(process) as batcher:
        futures = await batcher.submit_batch(range(8))
        results = await asyncio.gather(*futures, return_exceptions=True)
    assert [result for result in results if not isinstance(result, ValueError)] == [0, 1, 2, 4, 6, 7]
    assert results[3] is not results[5]


@virtual
async def test_utilization_reads_zero_in_the_middle_of_a_batch() -> None:
    async with dynamic_batcher(Model(10.0)) as batcher:
        future = await batcher.submit(1)
        await asyncio.sleep(5)
        assert batcher.stats.utilization > 0.99
        await future


def test_min_above_max_is_accepted() -> None:
    with pytest.raises(ValueError, match="min_batch_size must be at most max_batch_size=4, not 5"):
        DynamicBatcher(Model(), min_batch_size=5, max_batch_size=4)


@virtual
async def test_a_dict_is_taken_apart_by_its_keys() -> None:
    async def process(batch: list[str]) -> Any:
        return {record: record.upper() for record in batch}

    async with dynamic_batcher(process) as batcher:
        future = await batcher.submit("a")
        with pytest.raises(ValueError, match="sequence with one result per record, not dict"):
            await future


def test_a_record_costs_many_times_what_a_future_does() -> None:
    count = 5000

    async def process(batch: list[int]) -> list[int]:
        return batch

    async def bare() -> float:
        loop = asyncio.get_running_loop()
        before = time.process_time()
        queue: deque[asyncio.Future[int]] = deque()
        for _ in range(count):
            queue.append(loop.create_future())
        futures = list(queue)
        while queue:
            queue.popleft().set_result(1)
        await asyncio.gather(*futures)
        return time.process_time() - before

    async def batched() -> float:
        async with DynamicBatcher(process) as batcher:
            before = time.process_time()
            futures = []
            for i in range(count):
                futures.append(await batcher.submit(i, priority=i % 3, tenant="abcd"[i % 4]))
            await asyncio.gather(*futures)
            return time.process_time() - before

    # Measured: 1.9 times; the library that this replaces: 6 times. Since 3.12 a bare future costs half.
    ratio = min(asyncio.run(batched()) for _ in range(5)) / min(asyncio.run(bare()) for _ in range(5))
    assert ratio < (5 if sys.version_info < (3, 12) else 10)


# Ray Serve's @serve.batch


@virtual
async def test_batches_form_while_the_worker_is_busy() -> None:
    model = Model(1.0)
    async with dynamic_batcher(model, max_batch_size=8, batch_timeout_s=0.01) as batcher:
        futures = [await batcher.submit(0)]
        await blocked()
        for i in range(1, 7):
            futures.append(await batcher.submit(i))
            await asyncio.sleep(0.1)
        futures.append(await batcher.submit("urgent", priority=-1))
        await asyncio.gather(*futures)
    assert model.batches == [[0], ["urgent", 1, 2, 3, 4, 5, 6]]


@virtual
async def test_a_deferred_record_goes_to_the_back_and_can_starve() -> None:
    model = Model(0.1)
    async with dynamic_batcher(model, target_batch_cost=10) as batcher:
        futures = [await batcher.submit("first", estimated_cost=1)]
        await blocked()
        futures.append(await batcher.submit("small", estimated_cost=3))
        futures.append(await batcher.submit("LARGE", estimated_cost=9))
        for i in range(20):
            futures.append(await batcher.submit(i, estimated_cost=3))
        await asyncio.gather(*futures)
    assert model.batches[1:3] == [["small"], ["LARGE"]]


@virtual
async def test_the_size_function_is_called_again_and_again() -> None:
    calls = 0

    def cost(record: int) -> int:
        nonlocal calls
        calls += 1
        return 1

    async with dynamic_batcher(Model(), cost_estimator=cost, max_batch_size=16) as batcher:
        await asyncio.gather(*(await batcher.submit_batch(range(100))))
    assert calls == 100


@virtual
async def test_an_error_in_the_size_function_stops_the_queue_for_good() -> None:
    def cost(record: Any) -> int:
        if record == "bad":
            raise KeyError(record)
        return 1

    async with dynamic_batcher(Model(), cost_estimator=cost) as batcher:
        before = await batcher.submit("before")
        with pytest.raises(KeyError):
            await batcher.submit("bad")
        after = await batcher.submit("after")
        assert [await before, await after] == ["before", "after"]


# What none of them has


@virtual
async def test_one_tenant_keeps_all_others_waiting() -> None:
    model = Model(0.1)
    async with dynamic_batcher(model, max_batch_size=4, prefetch_batches=0) as batcher:
        greedy = [await batcher.submit("greedy", tenant="greedy") for _ in range(400)]
        await asyncio.sleep(0.05)
        before = now()
        await (await batcher.submit("modest", tenant="modest"))
        assert now() - before < 0.2
        await asyncio.gather(*greedy)
