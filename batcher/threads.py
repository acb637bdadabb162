"""Submitting from threads, which have no event loop to await on."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

ResultT = TypeVar("ResultT")


class Submits(Protocol[ResultT]):
    """A batcher, as far as a thread needs it."""

    @property
    def submit(self) -> Callable[..., Coroutine[Any, Any, "asyncio.Future[ResultT]"]]: ...

    @property
    def loop(self) -> asyncio.AbstractEventLoop: ...


class ThreadClient(Generic[ResultT]):
    """Submits to a batcher from any thread but the one in which it runs.

    Args:
        batcher: A batcher that has been started.

    Raises:
        RuntimeError: It has not been started.
    """

    def __init__(self, batcher: Submits[ResultT]) -> None:
        self._batcher = batcher
        self._loop = batcher.loop
        self._feeding: set[asyncio.Task[None]] = set()

    def submit(
        self, *args: Any, timeout: float | None = None, **options: Any
    ) -> "concurrent.futures.Future[ResultT]":
        """Submit one record, blocking while the queue is full, and return the future of its result.

        Args:
            args: As for the batcher's own `submit`.
            timeout: Seconds to block at most; None: as long as it takes.
            options: As for the batcher's own `submit`.

        Raises:
            TimeoutError: There was no room in time; the record was not submitted.
            RuntimeError: The caller is in the batcher's own thread, which must not block.
        """
        if _running_loop() is self._loop:
            raise RuntimeError("a ThreadClient blocks: use the batcher itself in the thread in which it runs")
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        result: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
        self._loop.call_soon_threadsafe(self._start, args, options, accepted, result)
        concurrent.futures.wait((accepted,), timeout)
        # Of this cancel and the loop's acceptance exactly one succeeds.
        if not accepted.done() and accepted.cancel():
            raise TimeoutError(f"there was no room in the queue for {timeout} s")
        accepted.result()
        return result

    def process(self, *args: Any, timeout: float | None = None, **options: Any) -> ResultT:
        """Submit one record and block until its result is there.

        Args:
            args: As for the batcher's own `submit`.
            timeout: Seconds to block at most; None: as long as it takes.
            options: As for the batcher's own `submit`.

        Raises:
            TimeoutError: There was no result in time; the record is cancelled.
            RuntimeError: The caller is in the batcher's own thread, which must not block.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        future = self.submit(*args, timeout=timeout, **options)
        left = None if give_up_at is None else max(0.0, give_up_at - time.monotonic())
        concurrent.futures.wait((future,), left)
        if not future.done() and future.cancel():
            raise TimeoutError(f"there was no result for {timeout} s")
        return future.result()

    def _start(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        accepted: "concurrent.futures.Future[None]",
        result: "concurrent.futures.Future[ResultT]",
    ) -> None:
        task = self._loop.create_task(self._feed(args, options, accepted, result))
        self._feeding.add(task)
        task.add_done_callback(self._feeding.discard)

        def give_up(accepted: "concurrent.futures.Future[None]") -> None:
            if accepted.cancelled():
                self._loop.call_soon_threadsafe(task.cancel)

        accepted.add_done_callback(give_up)

    async def _feed(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        accepted: "concurrent.futures.Future[None]",
        result: "concurrent.futures.Future[ResultT]",
    ) -> None:
        try:
            future = await self._batcher.submit(*args, **options)
        except Exception as error:
            if accepted.set_running_or_notify_cancel():
                accepted.set_exception(error)
            return
        if not accepted.set_running_or_notify_cancel():
            future.cancel()
            return
        accepted.set_result(None)

        def tell(future: "asyncio.Future[ResultT]") -> None:
            if future.cancelled():
                result.cancel()
            elif result.set_running_or_notify_cancel():
                error = future.exception()
                if error is not None:
                    result.set_exception(error)
                else:
                    result.set_result(future.result())

        def withdraw(result: "concurrent.futures.Future[ResultT]") -> None:
            if result.cancelled():
                self._loop.call_soon_threadsafe(future.cancel)

        future.add_done_callback(tell)
        result.add_done_callback(withdraw)


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
