"""Submitting from threads, which have no event loop to await on."""

import asyncio
import concurrent.futures
import inspect
import math
import time
from collections.abc import Collection
from concurrent.futures import Future
from typing import Any, Generic, Protocol

from batcher import checks
from batcher.entries import ResultT
from batcher.errors import Closed

LOOK_S = 0.5  # seconds between two looks at whether the event loop, on which a thread waits, still runs


class Submits(Protocol[ResultT]):
    """A batcher, as far as a thread needs it."""

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...

    async def submit(self, *args: Any, **options: Any) -> "asyncio.Future[ResultT]": ...


class ThreadClient(Generic[ResultT]):
    """Submits to a batcher that has been started, from any thread but the one in which it runs."""

    def __init__(self, batcher: Submits[ResultT]) -> None:
        self._batcher = batcher
        self._loop = batcher.loop

    def submit(self, *args: Any, timeout: float | None = None, **options: Any) -> Future[ResultT]:
        """Submit one record, blocking while the queue is full, and return the future of its result.

        Args:
            args, options: As for the batcher's own `submit`; a limit on the record's wait goes as `deadline`.
            timeout: Seconds to block at most; None: as long as it takes.

        Raises:
            TimeoutError: There was no space in time; the record was not submitted.
            RuntimeError: This is the batcher's own thread, or its event loop doesn't run (`Closed`). And what
                the batcher's own `submit` raises.
        """
        if timeout is not None:
            checks.seconds("timeout", timeout)
        if asyncio._get_running_loop() is self._loop:
            raise RuntimeError("a ThreadClient blocks: use the batcher itself in the thread in which it runs")
        since = time.monotonic()
        accepted: Future[None] = Future()
        feeding = self._feed(args, options, accepted)
        try:
            result = asyncio.run_coroutine_threadsafe(feeding, self._loop)
            self._wait((accepted, result), timeout, since)
        except RuntimeError as error:
            if inspect.getcoroutinestate(feeding) == inspect.CORO_CREATED:
                feeding.close()
            raise Closed("the event loop of the batcher is closed or doesn't run") from error
        # Of this cancel and the loop's acceptance exactly one succeeds.
        if accepted.cancel():
            if result.cancelled():
                raise Closed("the event loop of the batcher has ended")
            if result.done():
                result.result()
            result.cancel()
            raise TimeoutError(f"there was no space in the queue for {timeout} s")
        return result

    def process(self, *args: Any, timeout: float | None = None, **options: Any) -> ResultT:
        """Submit as `submit` does, and block until the result is there; TimeoutError cancels the record."""
        since = time.monotonic()
        result = self.submit(*args, timeout=timeout, **options)
        self._wait((result,), timeout, since)
        if not result.done() and result.cancel():
            raise TimeoutError(f"there was no result for {timeout} s")
        return result.result()

    def _wait(self, futures: Collection[Future[Any]], timeout: float | None, since: float) -> None:
        """Wait until one of some futures is done; raise `Closed` if the event loop does not run."""
        end = math.inf if timeout is None else since + timeout
        ran = True
        while (left := min(LOOK_S, end - time.monotonic())) > 0:
            try:
                if concurrent.futures.wait(futures, left, concurrent.futures.FIRST_COMPLETED).done:
                    return
            except BaseException:
                # After Ctrl-C the result is of no use.
                for future in futures:
                    future.cancel()
                raise
            runs = self._loop.is_running()
            if not (runs or ran) and all(future.cancel() for future in futures):
                raise Closed("the event loop of the batcher doesn't run")
            ran = runs

    async def _feed(self, args: tuple[Any, ...], options: dict[str, Any], accepted: Future[None]) -> ResultT:
        task = asyncio.current_task()
        assert task is not None
        # Python reports errors that are not looked at; a thread that has given up doesn't take one.
        task.add_done_callback(lambda done: done.cancelled() or done.exception())
        try:
            future = await self._batcher.submit(*args, **options)
            if accepted.set_running_or_notify_cancel():
                accepted.set_result(None)
            else:
                future.cancel()
            return await future
        except asyncio.CancelledError:
            if task.cancelling():
                raise Closed("the event loop of the batcher has ended") from None
            # The record was cancelled.
            raise
