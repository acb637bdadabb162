"""One batch through `process_fn`: the call, the results, and the records that an error is due to."""

import asyncio
import contextvars
import inspect
import math
import random
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence, Set, Sized
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, cast

from batcher.entries import Entry
from batcher.errors import LATE, Aborted, BadResults, Expired, described, fit, separate
from batcher.stats import BatchObservation, Outcome, Recorder

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

OnError = Literal["split", "fail", "single"]
ON_ERROR = ("split", "fail", "single")

OUTAGE = 40  # records that fail alone, while none succeeds, after which a split doesn't try the rest
ONE_BY_ONE = 0.38  # share of bad records from which on testing each alone is best (Hwang; (3 - √5) / 2)

ProcessFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]
InferenceFn = Callable[[list[RecordT]], Awaitable[Sequence[ResultT]] | Sequence[ResultT]]


class ProcessCall(Generic[RecordT, ResultT]):
    """A function of a batch that is called on the event loop if it is asynchronous, else in a thread."""

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
                inside, or raised StopIteration or GeneratorExit.
            Exception: What it raised itself.
        """
        count = len(records)
        task = asyncio.current_task()
        try:
            results: Any
            if self._threads is None:
                results = await cast(Awaitable[Any], self._process_fn(records))
            else:
                results = await self._call_in_thread(self._threads, records)
        except asyncio.CancelledError:
            if task is not None and task.cancelling():
                raise
            raise Aborted("process_fn was cancelled from inside") from None
        except GeneratorExit:
            if task is None or asyncio.current_task(task.get_loop()) is not task:
                # The coroutine is collected, with the event loop on which it waited.
                raise
            raise Aborted("process_fn raised GeneratorExit") from None
        return checked(results, count)

    async def _call_in_thread(self, threads: ThreadPoolExecutor, records: list[RecordT]) -> Any:
        # The traceback of an error holds all frames here and in the thread. If one of them held the error,
        # what `process_fn` had in memory would stay there while a part of the batch runs again.
        outcomes: list[tuple[Any, BaseException | None]] = []

        def call() -> None:
            try:
                outcomes.append((self._process_fn(records), None))
            except BaseException as error:
                outcomes.append((None, error))

        context = contextvars.copy_context()
        await asyncio.get_running_loop().run_in_executor(threads, context.run, call)
        results, error = outcomes.pop()
        if error is not None:
            try:
                if isinstance(error, Exception) and not isinstance(error, StopIteration):
                    raise error
                raise Aborted(f"process_fn raised {described(error)}") from error
            finally:
                del error
        return await results if inspect.isawaitable(results) else results


def checked(results: Any, count: int) -> Sequence[Any]:
    """Return the results of `count` records as a sequence, or raise `BadResults`."""
    if not isinstance(results, list | tuple):
        unfit = isinstance(results, str | bytes | bytearray | Mapping | Set)
        # A table, of pandas for instance, yields the names of its columns.
        unfit = unfit or hasattr(type(results), "columns")
        if unfit or not isinstance(results, Sized) or not isinstance(results, Iterable):
            raise BadResults(
                f"process_fn must return a sequence with one result per record, not {type(results).__name__}"
            )
        # An array or a tensor: its rows are the results.
        results = list(results)
    if len(results) != count:
        raise BadResults(f"process_fn returned {len(results)} results for a batch of {count} records")
    return cast(Sequence[Any], results)


class Search:
    """Finds the records of a failed batch that fail alone: adaptive group testing.

    The batch is halved until a record fails alone. The rest is then tested in groups, as large as the
    share of bad records found so far suggests. No record fails that has not failed alone, but in an outage:
    when `OUTAGE` records, picked at random, have failed alone and none has succeeded, the rest isn't tried.
    With d bad records of n that takes about d (log2(n / d) + 4) + log2(n) calls at most, and never more
    than 2 n. With "single" each record is tested alone, whatever is found; with "fail" there is no search.

    Attributes:
        tests: Groups that were tested; the first is the batch.
    """

    def __init__(self, on_error: OnError) -> None:
        self.tests: int = 0
        self._on_error = on_error
        # Entries still to be tested, of which so many at the head have failed together.
        self._pool: deque[Entry[Any]] = deque()
        self._suspects = 0
        self._bad = self._good = 0

    def passed(self, part: list[Entry[Any]]) -> None:
        """Take in that a group has succeeded."""
        self.tests += 1
        self._good += len(part)
        self._suspects = max(0, self._suspects - len(part))

    def failed(self, part: list[Entry[Any]], error: Exception) -> list[Entry[Any]]:
        """Take in that a group has failed; return the entries that the error is due to, if they are found."""
        self.tests += 1
        if len(part) == 1:
            self._bad += 1
            self._suspects = 0
            return part + self._outage()
        if self.tests == 1 and (self._on_error == "fail" or isinstance(error, BadResults)):
            return part
        self._pool.extendleft(reversed(part))
        self._suspects = len(part)
        return []

    def next(self) -> list[Entry[Any]]:
        """Return the entries to test next; none: all are known."""
        pool = self._pool
        if self._on_error == "single" or self._suspects == 1:
            size = 1
        elif self._suspects:
            size = self._suspects // 2
        else:
            size = self._group()
        if self._bad and not self._good and pool:
            # A caller's bad records stand together: whether others are good shows elsewhere.
            pool.rotate(-random.Random(len(pool)).randrange(len(pool)))
        part: list[Entry[Any]] = []
        while pool and len(part) < size:
            entry = pool.popleft()
            if entry.done():
                self._suspects = max(0, self._suspects - 1)
            else:
                part.append(entry)
        return part

    def _outage(self) -> list[Entry[Any]]:
        """Return the rest of the entries if there is no hope for them."""
        if self._on_error == "single" or self._good or self._bad < OUTAGE:
            return []
        rest = list(self._pool)
        self._pool.clear()
        return rest

    def _group(self) -> int:
        if not self._good:
            return 1
        # The first one says little of the others.
        share = (self._bad - 1) / (self._bad + self._good)
        if share >= ONE_BY_ONE:
            return 1
        if share <= 0:
            return len(self._pool)
        return 1 << max(0, int(math.log2(math.log(2) / share)))


@dataclass(slots=True, eq=False)
class Processor(Generic[ResultT]):
    """Runs batches of entries and ends each entry."""

    _call: ProcessCall[Any, ResultT]
    _on_error: OnError
    _recorder: Recorder
    _clock: Callable[[], float]

    async def run(self, batch: list[Entry[ResultT]], free: Callable[[bool], None]) -> None:
        """Process a batch; if it fails, search for the records that it is due to.

        Args:
            batch: The entries; each of them ends.
            free: Called when `process_fn` won't be called again, before the last entries end: so the next
                batch can start before the callers of this one take the event loop. It is told whether
                `process_fn` was called just once.
        """
        search = Search(self._on_error)
        try:
            part = self._in_time(batch)
            while part:
                ended, started = part, self._clock()
                results: Sequence[ResultT | BaseException]
                try:
                    results = await self._call([entry.record for entry in part])
                    search.passed(part)
                except Exception as error:
                    ended = search.failed(part, error)
                    results = [error] * len(ended)
                self._count_batch(part)
                if not ended:
                    self._recorder.ran(len(part), (), self._clock() - started)
                part = search.next()
                if ended and not part:
                    free(search.tests == 1)
                if ended:
                    self._end(ended, results, started)
        except GeneratorExit:
            # The event loop was closed: nobody waits for these entries any more.
            raise
        except BaseException as cause:
            for entry in batch:
                if not entry.done():
                    self._recorder.total_failed += 1
                    entry.fail(Aborted(f"the batch was cut short by {described(cause)}"))
            raise

    def _in_time(self, batch: list[Entry[ResultT]]) -> list[Entry[ResultT]]:
        """Return the entries that were not cancelled; end those that come too late."""
        now = self._clock()
        late = [entry for entry in batch if entry.deadline is not None and entry.deadline <= now]
        for entry in late:
            if not entry.done():
                self._recorder.unserved(entry, late=True)
                entry.fail(Expired(LATE))
        return [entry for entry in batch if not entry.done()]

    def _count_batch(self, part: list[Entry[ResultT]]) -> None:
        recorder = self._recorder
        costs = [entry.cost for entry in part]
        cost = sum(costs)
        recorder.batches += 1
        recorder.batch_records += len(part)
        recorder.batch_cost += cost
        recorder.padded_cost += max(costs) * len(part)
        if recorder.observations is not None:
            recorder.observations.batches.append(BatchObservation(len(part), cost))

    def _end(
        self, part: list[Entry[ResultT]], results: Sequence[ResultT | BaseException], started: float
    ) -> None:
        """Count records that ran, and end each with its result, or with an error object of its own."""
        recorder = self._recorder
        waits = [started - entry.submitted_at for entry in part]
        run_s = self._clock() - started
        recorder.ran(len(part), waits, run_s)
        completed = cost = 0
        submitted = 0.0
        seen: set[int] = set()
        for entry, result, wait_s in zip(part, results, waits, strict=True):
            outcome: Outcome = "completed"
            if entry.done():
                outcome = "cancelled"
            elif isinstance(result, BaseException):
                outcome = "failed"
                recorder.total_failed += 1
                error = fit(result)
                entry.fail(separate(error) if error is result and id(result) in seen else error)
                seen.add(id(result))
            else:
                completed += 1
                cost += entry.cost
                submitted += entry.submitted_at
                entry.record = None
                entry.set_result(result)
            if recorder.observations is not None:
                recorder.observe(entry.tenant, entry.priority, entry.cost, wait_s, run_s, outcome)
        recorder.total_completed += completed
        recorder.completed_cost += cost
        recorder.latency_s += completed * self._clock() - submitted
