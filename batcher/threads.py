"""Submitting from threads, which have no event loop to await on."""

import asyncio
import concurrent.futures
import time
from collections.abc import Callable, Coroutine
from typing import Any, Generic, Protocol, TypeVar

from batcher import checks
from batcher.errors import Closed

ResultT = TypeVar("ResultT")

LOOK_S = 0.5
"""Seconds between two looks at whether the event loop, on which a thread waits, still runs."""


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
            options: As for the batcher's own `submit`; a limit on the record's wait goes as `deadline`.

        Raises:
            TimeoutError: There was no space in time; the record was not submitted.
            RuntimeError: The caller is in the batcher's own thread, which must not block; or the event loop
                doesn't run (`Closed`).
            ValueError: The timeout is negative or not finite. And what the batcher's own `submit` raises.
        """
        if timeout is not None:
            checks.seconds("timeout", timeout)
        if _running_loop() is self._loop:
            raise RuntimeError("a ThreadClient blocks: use the batcher itself in the thread in which it runs")
        accepted: concurrent.futures.Future[None] = concurrent.futures.Future()
        result: concurrent.futures.Future[ResultT] = concurrent.futures.Future()
        try:
            self._loop.call_soon_threadsafe(self._start, args, options, accepted, result)
        except RuntimeError as error:
            raise Closed("the event loop of the batcher is closed") from error
        self._wait(accepted, timeout)
        # Of this cancel and the loop's acceptance exactly one succeeds.
        if not accepted.done() and accepted.cancel():
            raise TimeoutError(f"there was no space in the queue for {timeout} s")
        accepted.result()
        return result

    def process(self, *args: Any, timeout: float | None = None, **options: Any) -> ResultT:
        """Submit one record and block until its result is there; the arguments are those of `submit`.

        Raises:
            TimeoutError: There was no result in time; the record is cancelled. And what `submit` raises.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        future = self.submit(*args, timeout=timeout, **options)
        self._wait(future, None if give_up_at is None else max(0.0, give_up_at - time.monotonic()))
        if not future.done() and future.cancel():
            raise TimeoutError(f"there was no result for {timeout} s")
        return future.result()

    def _wait(self, future: "concurrent.futures.Future[Any]", timeout: float | None) -> None:
        """Wait for a future that the event loop resolves.

        Raises:
            Closed: The event loop doesn't run any more, or has never run.
        """
        give_up_at = None if timeout is None else time.monotonic() + timeout
        ran = True
        while not future.done():
            left = LOOK_S if give_up_at is None else min(LOOK_S, give_up_at - time.monotonic())
            if left <= 0:
                return
            concurrent.futures.wait((future,), left)
            runs = self._loop.is_running()
            if not (runs or ran or future.done()) and future.cancel():
                raise Closed("the event loop of the batcher doesn't run")
            ran = runs

    def _start(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        accepted: "concurrent.futures.Future[None]",
        result: "concurrent.futures.Future[ResultT]",
    ) -> None:
        task = self._loop.create_task(self._feed(args, options, accepted, result))
        if task.done():
            return
        self._feeding.add(task)
        task.add_done_callback(self._feeding.discard)

        def give_up(future: "concurrent.futures.Future[Any]") -> None:
            if future.cancelled() and self._loop.is_running():
                self._loop.call_soon_threadsafe(task.cancel)

        accepted.add_done_callback(give_up)
        result.add_done_callback(give_up)

    async def _feed(
        self,
        args: tuple[Any, ...],
        options: dict[str, Any],
        accepted: "concurrent.futures.Future[None]",
        result: "concurrent.futures.Future[ResultT]",
    ) -> None:
        """Submit a record for a thread, and pass its result on."""
        future: asyncio.Future[ResultT] | None = None
        try:
            future = await self._batcher.submit(*args, **options)
            if not accepted.set_running_or_notify_cancel():
                future.cancel()
                return
            accepted.set_result(None)
            # A wait, since a cancelled record is not a cancelled task.
            await asyncio.wait((future,))
            if future.cancelled():
                result.cancel()
                result.set_running_or_notify_cancel()
            elif result.set_running_or_notify_cancel():
                error = future.exception()
                if error is not None:
                    result.set_exception(error)
                else:
                    result.set_result(future.result())
        except BaseException as error:
            if future is not None:
                future.cancel()
            # At the end of the loop all tasks are cancelled: a thread must learn it too.
            ended = isinstance(error, asyncio.CancelledError)
            told = Closed("the event loop of the batcher has ended") if ended else error
            for waiting in (accepted, result):
                if not waiting.done() and waiting.set_running_or_notify_cancel():
                    waiting.set_exception(told)
            if not isinstance(error, Exception):
                raise


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        return None
