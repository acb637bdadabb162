"""How `process_fn` is called, and what it must answer."""

import asyncio
import contextvars
import inspect
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Generic, TypeVar, cast

from batcher.errors import Aborted, BadResults

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

ProcessFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]
InferenceFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]


class ProcessCall(Generic[RecordT, ResultT]):
    """A function of a batch that is called on the event loop if it is asynchronous, else in a thread.

    Args:
        process_fn: The function.
        concurrency: Calls that may run at once.
        name: What to call the threads.
    """

    def __init__(self, process_fn: ProcessFn[RecordT, ResultT], concurrency: int, name: str) -> None:
        self._process_fn = process_fn
        self._concurrency = concurrency
        self._name = name
        method = type(process_fn).__call__
        self._in_thread = not any(map(inspect.iscoroutinefunction, (process_fn, method)))
        self._threads: ThreadPoolExecutor | None = None

    def open(self) -> None:
        """Get ready for calls."""
        if self._in_thread:
            self._threads = ThreadPoolExecutor(self._concurrency, thread_name_prefix=self._name)

    def close(self) -> None:
        """Let the threads go; a call that still runs is not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def __call__(self, records: list[RecordT]) -> Sequence[ResultT]:
        """Call the function and return one result per record.

        Raises:
            BadResults: It returned something else.
            Aborted: It ended in a way that would look like the end of its caller: it was cancelled from
                inside, or raised StopIteration.
            Exception: What it raised itself.
        """
        count = len(records)
        try:
            results: Any
            if self._threads is None:
                results = await cast(Awaitable[Any], self._process_fn(records))
            else:
                results = await self._call_in_thread(self._threads, records)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if task is not None and task.cancelling():
                raise
            raise Aborted("process_fn was cancelled from inside") from None
        return checked(results, count)

    async def _call_in_thread(self, threads: ThreadPoolExecutor, records: list[RecordT]) -> Any:
        def call() -> tuple[Any, BaseException | None]:
            try:
                return self._process_fn(records), None
            except BaseException as error:
                return None, error

        context = contextvars.copy_context()
        results, error = await asyncio.get_running_loop().run_in_executor(threads, context.run, call)
        if error is not None:
            if isinstance(error, Exception) and not isinstance(error, StopIteration):
                raise error
            raise Aborted(f"process_fn raised {error!r}") from error
        return await results if inspect.isawaitable(results) else results


def checked(results: Any, count: int) -> Sequence[Any]:
    """Return the results of `count` records as a sequence.

    Raises:
        BadResults: They are no sequence, or not as many.
    """
    if not isinstance(results, list | tuple):
        unfit = isinstance(results, str | bytes | bytearray | Mapping | Set)
        if unfit or not isinstance(results, Sized) or not isinstance(results, Iterable):
            raise BadResults(
                f"process_fn must return a sequence with one result per record, not {type(results).__name__}"
            )
        # An array or a tensor: its rows are the results.
        results = list(results)
    if len(results) != count:
        raise BadResults(f"process_fn returned {len(results)} results for a batch of {count} records")
    return cast(Sequence[Any], results)
