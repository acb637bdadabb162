"""One batch through `process_fn`: the call, the results, and the records that an error is due to."""

import asyncio
import contextvars
import inspect
import random
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, cast

from batcher.costs import RecordT
from batcher.entries import Entry, ResultT
from batcher.errors import LATE, Aborted, BadResults, Expired, described, separate
from batcher.stats import BatchObservation, Observation, Outcome, Recorder

Entries = list[Entry[Any]]
OnError = Literal["split", "fail", "single"]
OUTAGE = 40  # records that fail alone, while none succeeds, after which a split doesn't try the rest

ProcessFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]
InferenceFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]


def checked(results: Any, count: int) -> Sequence[Any]:
    """Return the results of `count` records as a sequence, or raise `BadResults`."""
    if not isinstance(results, list | tuple):
        kind = type(results)
        # Rows of an array or a tensor are results. A table, of pandas for instance, yields names of columns.
        rows = isinstance(results, Sized) and isinstance(results, Iterable) and not hasattr(kind, "columns")
        if not rows or isinstance(results, str | bytes | bytearray | Mapping | Set):
            allowed = "a sequence with one result per record"
            raise BadResults(f"process_fn must return {allowed}, not {kind.__name__}")
        results = list(results)
    if len(results) != count:
        raise BadResults(f"process_fn returned {len(results)} results for a batch of {count} records")
    return cast(Sequence[Any], results)


class Parts(list[Entries]):
    """The parts of a batch that are still to run, the next part last; a part that fails is cut."""

    good = bad = 0  # entries that have succeeded, and entries that have failed alone

    def take(self) -> Entries:
        """Return the next part, without the entries that have ended; none: all have ended."""
        while self:
            if part := [entry for entry in self.pop() if not entry.done()]:
                return part
        return []

    def fail(self, part: Entries, single: bool) -> Entries:
        """Halve a part that has failed, or take it apart if `single`; return the entries that end with it."""
        if len(part) > 1:
            if not self.good and not self.bad and len(part) > OUTAGE:
                # A caller's bad records stand together: at random, good ones are met before 40 have failed.
                random.Random(len(part)).shuffle(part)
            size = 1 if single else (len(part) + 1) // 2
            self += [part[start : start + size] for start in range(0, len(part), size)][::-1]
            return []
        self.bad += 1
        if single or self.good or self.bad < OUTAGE:
            return part
        rest = [entry for left in self for entry in left]
        self.clear()
        return [*part, *rest]


@dataclass(slots=True, eq=False)
class Processor(Generic[ResultT]):
    """Runs batches of entries through a function, on the event loop or in threads, and ends each entry."""

    _process_fn: ProcessFn[Any, ResultT]
    concurrency: int
    _on_error: OnError
    _recorder: Recorder
    _clock: Callable[[], float]
    _is_async: bool = field(init=False)
    _threads: ThreadPoolExecutor | None = None

    def __post_init__(self) -> None:
        kinds = self._process_fn, type(self._process_fn).__call__
        self._is_async = any(map(inspect.iscoroutinefunction, kinds))

    def close(self) -> None:
        """Let the threads go; a call that still runs is not waited for."""
        if self._threads is not None:
            self._threads.shutdown(wait=False)
            self._threads = None

    async def run(self, batch: list[Entry[ResultT]], free: Callable[[bool], None]) -> None:
        """Process a batch; end each entry, unless cancelled. If the call fails, search for the cause.

        `free` is called after the last call, and told whether it was the only one, before the last entries
        end: so the next batch can start before the callers of this one take the event loop.
        """
        recorder, seen = self._recorder, set[int]()
        now = self._clock()
        for entry in batch:
            if entry.deadline is not None and entry.deadline <= now and not entry.done():
                recorder.unserved(entry, late=True)
                entry.fail(Expired(LATE))
        parts = Parts([batch])
        part = whole = parts.take()
        while tested := part:
            started = self._clock()
            results: Sequence[Any]
            try:
                results = checked(await self._call([entry.record for entry in tested]), len(tested))
                ended = tested
                parts.good += len(tested)
            except Exception as error:
                # The records that end get the error, with its traceback; that holds what `process_fn` had.
                as_one = self._on_error == "fail" or (tested is whole and isinstance(error, BadResults))
                ended = tested if as_one else parts.fail(tested, self._on_error == "single")
                results = [error] * len(ended)
            part = parts.take()
            costs = [entry.cost for entry in tested]
            recorder.batches += 1
            recorder.batch_records += len(tested)
            recorder.batch_cost += sum(costs)
            recorder.padded_cost += max(costs) * len(tested)
            if recorder.observations is not None:
                recorder.observations.batches.append(BatchObservation(len(tested), sum(costs)))
            if not ended:
                recorder.ran(len(tested), (), self._clock() - started)
            if not part:
                free(tested is whole)
            self._end(ended, results, started, seen)

    async def _call(self, records: list[Any]) -> Any:
        """Call the function; an error that would look like the end of the caller comes as `Aborted`."""
        task = asyncio.current_task()
        try:
            if self._is_async:
                return await cast(Awaitable[Any], self._process_fn(records))
            return await self._call_in_thread(records)
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise Aborted("process_fn was cancelled from inside") from None
        except GeneratorExit:
            if task is None or asyncio.current_task(task.get_loop()) is not task:
                # The coroutine is collected, with the event loop on which it waited.
                raise
            raise Aborted("process_fn raised GeneratorExit") from None

    async def _call_in_thread(self, records: list[Any]) -> Any:
        # The traceback of an error holds all frames here and in the thread. If one of them held the error,
        # what `process_fn` had in memory would stay there while a part of the batch runs again.
        def call() -> tuple[Any, list[BaseException]]:
            try:
                return self._process_fn(records), []
            except BaseException as error:
                # Raised below, outside the thread.
                return None, [error]

        self._threads = self._threads or ThreadPoolExecutor(self.concurrency, "DynamicBatcher")
        run = contextvars.copy_context().run
        results, errors = await asyncio.get_running_loop().run_in_executor(self._threads, run, call)
        if not errors:
            return await results if inspect.isawaitable(results) else results
        if isinstance(errors[0], Exception) and not isinstance(errors[0], StopIteration):
            raise errors.pop()
        raise Aborted(f"process_fn raised {described(errors[0])}") from errors.pop()

    def _end(self, part: list[Entry[Any]], results: Sequence[Any], started: float, seen: set[int]) -> None:
        """Count records that ran, and end each with its result, or with an error that none has got yet."""
        recorder, observations, run_s = self._recorder, self._recorder.observations, self._clock() - started
        waits = [started - entry.submitted_at for entry in part]
        recorder.ran(len(part), waits, run_s)
        completed, cost, waited_s = 0, 0, 0.0
        for entry, result, wait_s in zip(part, results, waits, strict=True):
            outcome: Outcome = "completed"
            if entry.done():
                outcome = "cancelled"
            elif isinstance(result, BaseException):
                outcome = "failed"
                recorder.total_failed += 1
                error = separate(result) if id(result) in seen else result
                seen.add(id(result))
                if isinstance(error, StopIteration) or not isinstance(error, Exception):
                    # A future can't carry it, or it looks like the end of its caller.
                    error = Aborted(f"the result of the record is {described(error)}")
                entry.fail(error)
            else:
                completed += 1
                cost += entry.cost
                waited_s += wait_s
                entry.record = None
                entry.set_result(result)
            if observations is not None:
                observed = Observation(entry.tenant, entry.priority, entry.cost, wait_s, run_s, outcome)
                observations.records.append(observed)
        recorder.total_completed += completed
        recorder.completed_cost += cost
        recorder.latency_s += waited_s + completed * run_s
