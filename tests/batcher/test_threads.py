"""Submitting from threads: blocking, with a timeout, and never twice."""

import asyncio
import concurrent.futures
import gc
import threading
from collections.abc import Callable
from typing import Any

import pytest

from batcher import Closed, ContinuousBatcher, DynamicBatcher, ThreadClient
from tests.batcher.virtual import until
from tests.progress import STILL_S

WAIT_S = STILL_S


async def in_thread(function: Callable[[], Any]) -> Any:
    async with asyncio.timeout(WAIT_S):
        return await asyncio.to_thread(function)


async def double(batch: list[int]) -> list[int]:
    return [2 * record for record in batch]


class Held:
    """A process function that waits until it is let go."""

    def __init__(self) -> None:
        self.seen: list[int] = []
        self.go = asyncio.Event()

    async def __call__(self, batch: list[int]) -> list[int]:
        self.seen += batch
        await self.go.wait()
        return batch


async def settled(condition: Callable[[], bool]) -> None:
    """Wait for what another thread brings about."""
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110 - a thread can't set an event of this loop
            await asyncio.sleep(0.001)


async def test_many_threads_submit_at_once() -> None:
    async with DynamicBatcher(double, max_queue_size=10) as batcher:
        client = ThreadClient(batcher)

        def work(start: int) -> list[int]:
            return [client.process(i, timeout=WAIT_S, estimated_cost=2) for i in range(start, start + 20)]

        async with asyncio.timeout(WAIT_S):
            results = await asyncio.gather(*(asyncio.to_thread(work, 100 * n) for n in range(8)))
    assert results == [[2 * i for i in range(100 * n, 100 * n + 20)] for n in range(8)]
    assert batcher.stats.total_batch_cost == 8 * 20 * 2


async def test_submit_returns_a_future() -> None:
    async with DynamicBatcher(double) as batcher:
        client = ThreadClient(batcher)

        def work() -> list[int]:
            futures = [client.submit(i) for i in range(5)]
            assert all(isinstance(future, concurrent.futures.Future) for future in futures)
            return [future.result(WAIT_S) for future in futures]

        assert await in_thread(work) == [0, 2, 4, 6, 8]


async def test_an_error_comes_back_to_the_thread() -> None:
    async def fail(batch: list[int]) -> list[int]:
        raise KeyError(batch[0])

    async with DynamicBatcher(fail) as batcher:
        client = ThreadClient(batcher)
        with pytest.raises(KeyError):
            await in_thread(lambda: client.process(1))
        with pytest.raises(ValueError, match="estimated_cost"):
            await in_thread(lambda: client.process(1, estimated_cost=-1))
    with pytest.raises(Closed):
        await in_thread(lambda: client.process(1))


async def test_a_thread_waits_for_space_no_longer_than_its_timeout() -> None:
    held = Held()
    async with DynamicBatcher(held, max_queue_size=1, max_batch_size=1, prefetch_batches=0) as batcher:
        client = ThreadClient(batcher)
        futures = [await batcher.submit(i) for i in range(2)]
        with pytest.raises(TimeoutError, match=r"no space in the queue for 0.01 s"):
            await in_thread(lambda: client.submit(2, timeout=0.01))
        await settled(lambda: batcher.stats.outside == 0)
        held.go.set()
        await asyncio.gather(*futures)
    assert held.seen == [0, 1]


async def test_what_is_accepted_too_late_is_cancelled() -> None:
    class Stubborn:
        """Accepts a record although its submission was cancelled in the meantime."""

        loop = asyncio.get_running_loop()
        future: asyncio.Future[int] = loop.create_future()

        async def submit(self, record: int) -> "asyncio.Future[int]":
            try:
                await asyncio.sleep(WAIT_S)
            except asyncio.CancelledError:
                return self.future
            raise AssertionError("the submission was not cancelled")

    stubborn = Stubborn()
    client = ThreadClient(stubborn)
    with pytest.raises(TimeoutError):
        await in_thread(lambda: client.submit(1, timeout=0.01))
    await settled(stubborn.future.cancelled)


async def test_a_thread_waits_for_a_result_no_longer_than_its_timeout() -> None:
    held = Held()
    async with DynamicBatcher(held) as batcher:
        client = ThreadClient(batcher)
        with pytest.raises(TimeoutError, match=r"no result for 0.01 s"):
            await in_thread(lambda: client.process(1, timeout=0.01))
        await settled(lambda: batcher.stats.total_cancelled == 1)
        held.go.set()


async def test_cancelling_in_a_thread_cancels_the_record() -> None:
    held = Held()
    async with DynamicBatcher(held, prefetch_batches=0) as batcher:
        client = ThreadClient(batcher)
        await in_thread(lambda: client.submit(1))
        await until(lambda: held.seen == [1])
        future = await in_thread(lambda: client.submit(2))
        assert future.cancel()
        await settled(lambda: batcher.stats.total_cancelled == 1)
        held.go.set()
    assert held.seen == [1]


async def test_what_ends_a_record_on_the_loop_ends_it_in_the_thread() -> None:
    async with ContinuousBatcher(capacity=10) as batcher:
        client: ThreadClient[None] = ThreadClient(batcher)
        tasks: list[asyncio.Task[Any]] = []

        async def process(_: int) -> None:
            task = asyncio.current_task()
            assert task is not None
            tasks.append(task)
            await asyncio.sleep(WAIT_S)

        future = await in_thread(lambda: client.submit(process, 1, 5))
        await until(lambda: bool(tasks))
        tasks[0].cancel()
        await settled(future.cancelled)
        await in_thread(lambda: client.submit(process, 2, 10))
        refused = await in_thread(lambda: client.submit(process, 3, 10))
        await batcher.stop(timeout=0)
        with pytest.raises(Closed):
            await in_thread(lambda: refused.result(WAIT_S))


async def test_it_refuses_to_block_the_event_loop() -> None:
    async with DynamicBatcher(double) as batcher:
        with pytest.raises(RuntimeError, match="use the batcher itself"):
            ThreadClient(batcher).submit(1)


async def test_it_needs_a_batcher_that_runs() -> None:
    with pytest.raises(RuntimeError, match="not running"):
        ThreadClient(DynamicBatcher(double))
    with pytest.raises(RuntimeError, match="not running"):
        _ = ContinuousBatcher(capacity=1).loop


async def test_another_loop_may_submit_from_its_own_thread() -> None:
    async with DynamicBatcher(double) as batcher:
        client = ThreadClient(batcher)

        async def elsewhere() -> int:
            return await asyncio.to_thread(client.process, 21)

        assert await in_thread(lambda: asyncio.run(elsewhere())) == 42


async def test_a_continuous_batcher_serves_threads_too() -> None:
    async with ContinuousBatcher(capacity=10) as batcher:
        client: ThreadClient[str] = ThreadClient(batcher)

        async def process(record: int) -> str:
            return f"<{record}>"

        assert await in_thread(lambda: client.process(process, 7, 5, timeout=WAIT_S)) == "<7>"


def start_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread and return it with what its work will have returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_thread_that_waits_for_space_learns_that_the_loop_has_ended() -> None:
    threads: list[tuple[threading.Thread, list[Any]]] = []

    async def main() -> None:
        batcher = DynamicBatcher(Held(), max_batch_size=1, max_queue_size=1, prefetch_batches=0)
        await batcher.start()
        client = ThreadClient(batcher)
        for number in range(2):
            await batcher.submit(number)
        threads.append(start_thread(lambda: client.submit(2)))
        threads.append(start_thread(lambda: ThreadClient(batcher).process(3)))
        await settled(lambda: batcher.stats.outside >= 2)

    asyncio.run(main())
    for thread, found in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert isinstance(found[0], Closed)


def test_a_thread_whose_record_has_not_reached_the_batcher_learns_that_the_loop_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    threads: list[tuple[threading.Thread, list[Any]]] = []
    sent = threading.Event()
    send = asyncio.run_coroutine_threadsafe

    def sending(*args: Any) -> Any:
        future = send(*args)
        sent.set()
        return future

    monkeypatch.setattr(asyncio, "run_coroutine_threadsafe", sending)

    async def main() -> None:
        batcher = DynamicBatcher(double)
        await batcher.start()
        client = ThreadClient(batcher)
        threads.append(start_thread(lambda: client.submit(1)))
        # The loop ends before its next pass.
        assert sent.wait(WAIT_S)

    asyncio.run(main())
    [(thread, found)] = threads
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert isinstance(found[0], Closed)


def test_a_thread_is_told_that_the_loop_does_not_run() -> None:
    loop = asyncio.new_event_loop()
    batcher = DynamicBatcher(double)
    loop.run_until_complete(batcher.start())
    client = ThreadClient(batcher)
    thread, found = start_thread(lambda: client.process(1))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert isinstance(found[0], Closed)
    loop.close()
    with pytest.raises(Closed, match="closed"):
        client.submit(1)


async def test_what_a_thread_no_longer_takes_is_not_reported(unraisable: list[Any]) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    held = Held()
    async with DynamicBatcher(held) as batcher:
        client = ThreadClient(batcher)
        with pytest.raises(TimeoutError):
            await in_thread(lambda: client.process(1, timeout=0.01))
        await settled(lambda: batcher.stats.total_cancelled == 1)
        held.go.set()
    gc.collect()
    assert (reported, unraisable) == ([], [])


@pytest.mark.parametrize(("waits_for", "space"), [("space", 1), ("result", 2)])
async def test_a_thread_that_is_interrupted_takes_its_record_back(
    waits_for: str, space: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt = threading.Event()
    wait = concurrent.futures.wait

    def interrupted(futures: Any, *args: Any) -> Any:
        # Of two futures the first one is that of the space.
        if waits_for == "result" and len(futures) == 2:
            return wait(futures, *args)
        interrupt.wait(WAIT_S)
        raise KeyboardInterrupt

    monkeypatch.setattr(concurrent.futures, "wait", interrupted)
    held = Held()
    async with DynamicBatcher(held, max_batch_size=1, max_queue_size=space, prefetch_batches=0) as batcher:
        client = ThreadClient(batcher)
        for number in range(2):
            await batcher.submit(number)
        thread, found = start_thread(lambda: client.process(2))
        await settled(lambda: batcher.stats.queue_depth + batcher.stats.outside == 2)
        interrupt.set()
        await asyncio.to_thread(thread.join, WAIT_S)
        assert isinstance(found[0], KeyboardInterrupt)
        await settled(lambda: batcher.stats.queue_depth + batcher.stats.outside == 1)
        held.go.set()
    assert held.seen == [0, 1]
