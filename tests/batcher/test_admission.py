"""The base of both batchers: the cost of waiting for space, event loops and stops."""

import asyncio
import gc
import logging
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from batcher import Aborted, ContinuousBatcher, DynamicBatcher, Oversize, QueueFull
from tests.batcher.helpers import (
    Holders,
    Machine,
    check_books,
    check_empty,
    continuous_batcher,
    dynamic_batcher,
    results_of,
)
from tests.batcher.lines import count_lines
from tests.batcher.virtual import VirtualLoop, blocked, now, virtual
from tests.fakes.clock import Clock
from tests.progress import STILL_S

WAIT_S = STILL_S

# Waiting for space


@virtual
async def test_a_waiter_for_space_costs_the_same_whatever_tenants_wait() -> None:
    async def lines_per_record(tenants: int) -> float:
        waiting = 2_000
        async with ContinuousBatcher(capacity=1, max_queue_size=10, clock=now) as batcher:

            async def send(tenant: str) -> None:
                async with batcher.slot(1, tenant=tenant):
                    await asyncio.sleep(0)

            with count_lines() as lines:
                await asyncio.gather(*(send(f"t{number % tenants}") for number in range(waiting)))
            return lines.count / waiting

    assert 100 < await lines_per_record(2_000) < 1.5 * await lines_per_record(1)


@virtual
async def test_polling_of_one_tenant_does_not_inflate_the_retry_after_of_another() -> None:
    async with ContinuousBatcher(capacity=1, max_queue_size=4, clock=now) as batcher:
        for _ in range(20):
            async with batcher.slot(1, tenant="a"):
                await asyncio.sleep(0.01)
        holders = Holders(batcher)
        for number in range(5):
            await holders.enter(f"a{number}", 1, tenant="a")

        async def told(tenant: str) -> float:
            with pytest.raises(QueueFull) as caught:
                batcher.slot_nowait(1, tenant=tenant)
            return caught.value.retry_after_s

        for _ in range(1_000):
            await told("a")
            await asyncio.sleep(0.001)
        waits = await told("b"), await told("a")
        await batcher.stop(drain=False, timeout=0)
    assert waits[0] < 0.1
    assert waits[1] <= 75.0


@virtual
async def test_capacity_that_shrinks_counts_for_those_outside_too() -> None:
    async with ContinuousBatcher(capacity=100, max_queue_size=1, clock=now) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 100)
        await holders.enter("waits", 5)
        await holders.enter("OUTSIDE", 90, wait=True)
        assert batcher.stats.outside == 1
        batcher.set_capacity(10)
        await blocked()
        assert isinstance(holders.tasks["OUTSIDE"].exception(), Oversize)
        assert batcher.stats.outside == 0
        await holders.leave("runs", "waits")
        check_empty(batcher)


# Event loops


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_eager_tasks_do_not_recurse() -> None:
    async def process(batch: list[int]) -> list[int]:
        return batch

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        async with DynamicBatcher(process, max_batch_size=1, max_concurrent_batches=2) as batcher:
            futures = await batcher.submit_batch(range(3_000))
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.gather(*futures) == list(range(3_000))
    finally:
        asyncio.get_running_loop().set_task_factory(None)


def test_a_submit_from_another_loop_is_refused() -> None:
    batcher: DynamicBatcher[Any, Any] = DynamicBatcher(Machine())
    window = ContinuousBatcher(capacity=1)

    async def at_home() -> None:
        async with batcher, window:
            found = await asyncio.to_thread(abroad)
            assert all("belongs to another event loop" in str(error) for error in found)
            assert batcher.stats.total_submitted == window.stats.total_submitted == 0

    def abroad() -> list[BaseException]:
        async def submit() -> list[BaseException]:
            found = await asyncio.gather(
                batcher.submit(1), window.slot(1).__aenter__(), batcher.stop(), return_exceptions=True
            )
            return [error for error in found if isinstance(error, BaseException)]

        errors = asyncio.run(submit())
        with pytest.raises(RuntimeError, match="another event loop") as caught:
            batcher.submit_nowait(1)
        return [*errors, caught.value]

    with asyncio.Runner() as runner:
        runner.run(at_home())


def test_a_loop_is_told_from_another_one_of_its_thread_and_may_change_its_thread() -> None:
    batcher: DynamicBatcher[Any, Any] = DynamicBatcher(Machine(0.0))
    window = ContinuousBatcher(capacity=1)

    async def start() -> None:
        await batcher.start()
        await window.start()

    async def submit() -> Any:
        async with window.slot(1):
            return await batcher.submit_nowait(1)

    async def stop() -> None:
        await batcher.stop()
        await window.stop()

    home, abroad = asyncio.new_event_loop(), asyncio.new_event_loop()
    home.run_until_complete(start())
    with pytest.raises(RuntimeError, match="another event loop"):
        abroad.run_until_complete(submit())
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(home.run_until_complete, submit()).result() == home.run_until_complete(submit())
    home.run_until_complete(stop())
    home.close()
    abroad.close()


def test_what_a_closed_loop_leaves_is_collected_in_silence(unraisable: list[Any]) -> None:
    clock = Clock()
    batchers: list[Any] = [
        DynamicBatcher(Machine(5.0), max_batch_size=2, clock=clock),
        ContinuousBatcher(capacity=1, clock=clock),
    ]

    async def first_life() -> None:
        for batcher in batchers:
            await batcher.start()
        asyncio.gather(*[batchers[0].submit_nowait(number) for number in range(4)])
        await Holders(batchers[1]).enter_all("ab")

    loop = VirtualLoop()
    loop.run_until_complete(first_life())
    loop.close()
    del loop
    batchers.clear()
    gc.collect()
    assert unraisable == []


# Stopping


@virtual
@pytest.mark.parametrize("turns", range(8))
async def test_a_shutdown_that_cancels_every_task_strands_no_record(turns: int) -> None:
    batcher = dynamic_batcher(Machine(), max_batch_size=1, max_concurrent_batches=2)
    await batcher.start()
    futures = [batcher.submit_nowait(number) for number in range(6)]
    for _ in range(turns):
        await asyncio.sleep(0)
    tasks = asyncio.all_tasks() - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await batcher.stop()
    results = await results_of(futures)
    assert [type(result) for result in results] == [Aborted] * len(tasks) + [str] * (6 - len(tasks))
    assert "cut short by CancelledError" in str(results[0])
    check_books(batcher)


@virtual
async def test_stop_from_what_it_waits_for_is_refused() -> None:
    async def process(batch: list[int]) -> list[int]:
        await batcher.stop()
        return batch

    async with dynamic_batcher(process, on_error="fail") as batcher:
        with pytest.raises(RuntimeError, match="wait for its own caller"):
            await (await batcher.submit(1))
        assert batcher.is_running
    async with continuous_batcher(1) as window:
        async with window.slot(1):
            with pytest.raises(RuntimeError, match="wait for its own caller"):
                await window.stop()
        with pytest.raises(RuntimeError, match="wait for its own caller"):
            await (await window.submit(lambda _: window.stop(), None, 1))


async def test_errors_of_a_stop_that_are_not_awaited_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def process(batch: list[int]) -> list[int]:
        return batch

    gc.collect()
    batcher = DynamicBatcher(process, min_batch_size=256, batch_timeout_s=60)
    await batcher.start()
    for number in range(100):
        await batcher.submit(number)
    with caplog.at_level(logging.ERROR):
        await batcher.stop(drain=False)
        gc.collect()
        await asyncio.sleep(0)
    assert not [record for record in caplog.records if "DynamicBatcher was stopped" in record.getMessage()]
