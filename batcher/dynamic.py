"""DynamicBatcher: collects records from many callers and runs them through one function, in batches."""

import asyncio
import functools
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from threading import get_ident
from typing import Any, Generic, Literal, TypedDict, Unpack, get_args, overload

from batcher import checks
from batcher.admission import RUNNING, STOPPING, UNKNOWN_WAIT_S, Batcher
from batcher.batch_delay import BatchDelay
from batcher.costs import CostEstimatorFn, RecordT, cost_of, whole_cost
from batcher.entries import Entry, ResultT
from batcher.errors import Aborted, Closed, Oversize, described
from batcher.forming import LOOKAHEAD_BATCHES, Former, Forming
from batcher.mapping import map_records
from batcher.processing import OnError, ProcessFn, Processor
from batcher.stats import BatchStats

TWO_COSTS = "give either cost or estimated_cost: they are two names for one thing"


class RecordOptions(TypedDict, total=False):
    """Arguments of `DynamicBatcher.submit_nowait` that many records may share."""

    priority: int
    tenant: str
    deadline: float | None
    timeout: float | None


class SubmitOptions(RecordOptions, total=False):
    """The arguments of `DynamicBatcher.submit_nowait` beside the record."""

    cost: int | None
    estimated_cost: int | None


@dataclass(slots=True, eq=False)
class _Run(Generic[ResultT]):
    """A batch whose records have not ended."""

    batch: list[Entry[ResultT]]
    started: float
    complete_at: float | None
    owner: asyncio.Task[None] | None = None


class DynamicBatcher(Batcher[Entry[ResultT]], Generic[RecordT, ResultT]):
    """Runs records from many callers through one function, in batches::

        async with DynamicBatcher(process, target_batch_cost=8_000) as batcher:
            future = await batcher.submit(record)
            result = await future

    A batch is decided when `process_fn` is free, or when it is full: while `process_fn` runs, a partial
    batch stays open. Its records are taken in the order of `RequestQueue`. A lone record runs at once, unless
    the batcher has learned that waiting for the following records makes all of them faster.

    Args:
        process_fn: Takes a list of records and returns a sequence of as many results, in the same order;
            a result that is an exception fails its record. Runs in a thread unless it is `async def`.
        cost_estimator: Returns the cost of a record; otherwise the record's own `estimate_cost()` does.
        target_batch_cost: Maximum cost of a batch.
        max_batch_size: Maximum records in a batch.
        min_batch_size: Fewest records in a batch, unless the timeout has passed or the batcher stops.
        batch_timeout_s: Longest wait of a record for more records, in seconds, while `process_fn` is free.
        max_queue_size, max_queue_cost: Records, and cost, that may wait, see the README; None: no bound.
        prefetch_batches: Above 0, "sorted" and "bucketed" choose a full batch while `process_fn` is busy.
        default_cost: Cost of a record without a cost of its own.
        max_concurrent_batches: Calls of `process_fn` that may run at once.
        forming: How batches are cut, see `Former`.
        lookahead: Records that are looked at to find some of like length; None: 16 batches.
        padded: The cost of a batch is that of its longest record times their number, not the sum.
        oversize: A record that costs more than a batch may: "alone" runs it by itself, "reject" refuses it.
        on_error: When `process_fn` raises, "split" runs parts of the batch again until the records that cause
            the error are alone, "single" runs each record again by itself, "fail" fails them all: for
            functions that must not run twice on a record.
        priority_aging_s, tenant_weights: See `RequestQueue`.
        clock: Returns the time in seconds, which never goes back; deadlines are on it.
    """

    _cost_methods: tuple[str, ...] = ("estimate_cost",)
    _runs: set[_Run[ResultT]]

    def __init__(
        self,
        process_fn: ProcessFn[RecordT, ResultT],
        *,
        cost_estimator: CostEstimatorFn[RecordT] | None = None,
        target_batch_cost: int = 32_000,
        max_batch_size: int = 256,
        min_batch_size: int = 1,
        batch_timeout_s: float = 0.05,
        max_queue_size: int = 5_000,
        prefetch_batches: int = 2,
        default_cost: int = 1,
        max_queue_cost: int | None = None,
        max_concurrent_batches: int = 1,
        forming: Forming = "arrival",
        lookahead: int | None = None,
        padded: bool = False,
        oversize: Literal["alone", "reject"] = "alone",
        on_error: OnError = "split",
        priority_aging_s: float | None = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checks.function("process_fn", process_fn)
        if cost_estimator is not None:
            checks.function("cost_estimator", cost_estimator)
        checks.whole("target_batch_cost", target_batch_cost, 1)
        checks.whole("max_batch_size", max_batch_size, 1)
        checks.whole("min_batch_size", min_batch_size, 1)
        checks.whole("prefetch_batches", prefetch_batches, 0)
        checks.whole("default_cost", default_cost, 0)
        checks.whole("max_concurrent_batches", max_concurrent_batches, 1)
        checks.whole("lookahead", lookahead, 1, optional=True)
        checks.seconds("batch_timeout_s", batch_timeout_s)
        checks.one_of("forming", forming, get_args(Forming))
        checks.flag("padded", padded)
        checks.one_of("oversize", oversize, ("alone", "reject"))
        checks.one_of("on_error", on_error, get_args(OnError))
        super().__init__(max_queue_size, max_queue_cost, priority_aging_s, tenant_weights, clock)
        for name, bound in (("max_batch_size", max_batch_size), ("max_queue_size", max_queue_size)):
            if min_batch_size > bound:
                raise ValueError(f"min_batch_size must be at most {name}={bound}, not {min_batch_size}")
        self._cost_of = functools.partial(cost_of, cost_estimator, self._cost_methods, default_cost)
        self._processor = Processor(process_fn, max_concurrent_batches, on_error, self._recorder, clock)
        lookahead = LOOKAHEAD_BATCHES * max_batch_size if lookahead is None else lookahead
        self._former = Former(forming, max_batch_size, target_batch_cost, padded, lookahead)
        self._plans = prefetch_batches > 0 and self._former.chooses
        self._min_batch_size = max_batch_size if forming == "static" else min_batch_size
        self._delay = BatchDelay(self._queue, self._min_batch_size, batch_timeout_s, clock, self._decide)
        self._max_queue_size = max_queue_size
        self._limit = target_batch_cost if oversize == "reject" else checks.LARGEST
        # Bound once: it would take 8% of the time of each record.
        self._told = self._withdraw
        self._calling: set[_Run[ResultT]] = set()  # those for which `process_fn` runs, or will
        # So much has to wait for the next decision: a record that comes before that costs little.
        self._due_size = self._due_cost = 0.0

    @property
    def stats(self) -> BatchStats:
        """A snapshot, true at this moment."""
        recorder = self._recorder
        running = self._entries()
        batches = recorder.batches or 1
        return BatchStats(
            **self._common_stats(self._clock()),
            running=len(running),
            running_cost=sum(entry.cost for entry in running),
            total_batches=recorder.batches,
            total_batch_cost=recorder.batch_cost,
            total_padded_cost=recorder.padded_cost,
            avg_batch_size=recorder.batch_records / batches,
            avg_batch_cost=recorder.batch_cost / batches,
            padding_ratio=1 - recorder.batch_cost / recorder.padded_cost if recorder.padded_cost else 0.0,
        )

    def submit_nowait(
        self,
        record: RecordT,
        *,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        timeout: float | None = None,
        estimated_cost: int | None = None,
    ) -> Entry[ResultT]:
        """Queue one record at once and return the future of its result.

        Args:
            record: The record, as `process_fn` takes it.
            cost, estimated_cost: Its cost, by either name; None: the cost by the estimator, or the default.
            priority, tenant: Its tier, lower goes first, and the name of its tenant.
            deadline: Time on `clock` by which it must have started, or else fails with `Expired`.
            timeout: The same in seconds from now.

        Raises:
            QueueFull: There is no space; says when to try again.
            RuntimeError: The batcher isn't running (`Closed`), or runs on another event loop.
            Oversize: It costs more than a whole batch may, and `oversize` is "reject".
            Expired: The deadline has passed.
        """
        return self._submit(record, False, cost, priority, tenant, deadline, timeout, estimated_cost)

    async def submit(
        self,
        record: RecordT,
        *,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of the record, not of this call
        estimated_cost: int | None = None,
    ) -> Entry[ResultT]:
        """Queue one record as `submit_nowait` does, but wait while the queue is full, up to its deadline."""
        entry = self._submit(record, True, cost, priority, tenant, deadline, timeout, estimated_cost)
        if not entry.admitted:
            try:
                await self._wait_for_space(entry)
            except BaseException:
                entry.cancel()
                raise
        return entry

    async def submit_batch(
        self,
        records: Iterable[RecordT],
        *,
        cost: Sequence[int] | None = None,
        estimated_cost: Sequence[int] | None = None,
        **options: Unpack[RecordOptions],
    ) -> list[Entry[ResultT]]:
        """Submit records and return their futures in order; if one is refused, cancel the earlier records.

        `cost`, or `estimated_cost`, has a cost for each; the other arguments are for all of them.
        """
        records = list(records)
        if cost is not None and estimated_cost is not None:
            raise ValueError(TWO_COSTS)
        name, given = ("cost", cost) if estimated_cost is None else ("estimated_cost", estimated_cost)
        each: Sequence[int | None] = [None] * len(records) if given is None else given
        checks.costs(name, each)
        # All are checked before the first one is queued.
        costs = [None if one is None else whole_cost(name, one) for one in each]
        if len(costs) != len(records):
            raise ValueError(
                f"{name} must have one cost for each of the {len(records)} records, not {len(costs)}"
            )
        if (timeout := options.pop("timeout", None)) is not None:
            options["deadline"] = self._deadline(options.get("deadline"), timeout, self._clock())
        entries: list[Entry[ResultT]] = []
        try:
            for record, one in zip(records, costs, strict=True):
                entries.append(await self.submit(record, cost=one, **options))
        except BaseException:
            for entry in entries:
                entry.cancel()
            raise
        return entries

    @overload
    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = ...,
        max_pending: int | None = ...,
        return_exceptions: Literal[False] = ...,
        **options: Unpack[RecordOptions],
    ) -> AsyncGenerator[ResultT, None]: ...

    @overload
    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = ...,
        max_pending: int | None = ...,
        return_exceptions: bool,
        **options: Unpack[RecordOptions],
    ) -> AsyncGenerator[ResultT | Exception, None]: ...

    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = True,
        max_pending: int | None = None,
        return_exceptions: bool = False,
        **options: Unpack[RecordOptions],
    ) -> AsyncGenerator[Any, None]:
        """Process any number of records in bounded memory; iterate over the results with `async for`.

        Args:
            records: Records for `submit`, read as they are needed.
            ordered: Results come in the order of `records`; False: as they are done.
            max_pending: Maximum records under way, until their results are taken; None: `max_queue_size`.
            return_exceptions: An error takes the place of a result; False: it is raised, the rest cancelled.
            options: The other arguments of `submit`, for each of them.
        """
        max_pending = self._max_queue_size if max_pending is None else max_pending
        checks.whole("max_pending", max_pending, 1)
        submit = functools.partial(self.submit, **options)
        return map_records(submit, records, ordered, max_pending, return_exceptions)

    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        # The time until `process_fn` is free, and the batches before its own at their mean time.
        before, ahead = self._queue.ahead(priority, tenant)
        free = len(self._calling) < self._processor.concurrency
        if free and not before:
            return 0.0
        batch_s = self._delay.batch_s
        if batch_s is None:
            return UNKNOWN_WAIT_S
        former, before, ahead = self._former, before + records - 1, ahead + cost - 1
        batches = max(before // former.max_records, int(ahead // former.budget))
        rest = 0.0 if free else max(0.0, min(run.started for run in self._calling) + batch_s - self._clock())
        return rest + batches * batch_s / self._processor.concurrency

    def _submit(
        self,
        record: RecordT,
        wait: bool,
        cost: int | None,
        priority: int,
        tenant: str,
        deadline: float | None,
        timeout: float | None,
        estimated_cost: int | None,
    ) -> Entry[ResultT]:
        if self._state != RUNNING or get_ident() != self._thread or not self._loop_runs():
            self._check_open()
        if estimated_cost is not None:
            if cost is not None:
                raise ValueError(TWO_COSTS)
            cost = whole_cost("estimated_cost", estimated_cost)
        elif cost is None:
            cost = self._cost_of(record)
        now = self._clock()
        if deadline is not None or timeout is not None:
            deadline = self._deadline(deadline, timeout, now)
        entry: Entry[ResultT] = Entry(
            record, cost, priority, tenant, deadline, 1, self._loop, self._told, now
        )
        if entry.cost > self._limit:
            self._recorder.total_rejected += 1
            raise Oversize(entry.cost, self._limit)
        queue = self._queue
        if not queue.put(entry) or queue.total >= self._due_size or queue.total_cost >= self._due_cost:
            self._enter(entry, wait)
        elif deadline is not None:
            self._set_alarm()
        return entry

    def _start_ready(self) -> None:
        """Start every batch that can start, and note when there is something to decide again."""
        queue, former = self._queue, self._former
        while len(self._calling) < self._processor.concurrency:
            total = queue.total
            if not total:
                self._delay.release()
                self._due_size = 0
                return
            if not (former.full(total, queue.total_cost) or self._delay.over or self._state == STOPPING):
                self._delay.hold(self.loop)
                self._due_size = self._min_batch_size if total < self._min_batch_size else former.max_records
                self._due_cost = former.budget
                return
            complete_at = self._delay.release()
            batch = former.cut(queue)
            # A record found too late on the way ends before the batch begins; an empty batch ends at once.
            self._end_late()
            run = _Run(batch, self._clock(), complete_at)
            self._recorder.switch(True, run.started)
            self._runs.add(run)
            self._calling.add(run)
            self._due_size = 0  # what is left may be enough for the next choice
            # `process_fn` doesn't run in the context of the caller that happened to complete the batch.
            processing = self._processor.run(batch, functools.partial(self._free, run))
            run.owner = self.loop.create_task(processing, context=self._context.copy())
            run.owner.add_done_callback(functools.partial(self._finish, run))
        if not self._plans or former.planned:
            self._due_size = self._due_cost = math.inf
        elif queue.total >= self._due_size or queue.total_cost >= self._due_cost:
            self._due_size, self._due_cost = former.plan(queue)

    def _finish(self, run: _Run[ResultT], task: asyncio.Task[None]) -> None:
        """Let go of a batch, and end the rest of it: its task may be cancelled before its first step."""
        error = (not task.cancelled() and task.exception()) or asyncio.CancelledError()
        for entry in run.batch:
            if not entry.done():
                self._end(entry, Aborted(f"the batch was cut short by {described(error)}"))
        self._free(run, False)
        self._runs.discard(run)
        if self._ended is not None:
            self._decide()

    def _free(self, run: _Run[ResultT], typical: bool) -> None:
        """Make space for the next batch, unless the run has done so already, or was given up."""
        if run not in self._calling:
            return
        self._calling.remove(run)
        now = self._clock()
        self._recorder.switch(bool(self._calling), now)
        if typical:
            self._delay.learn(now - run.started, run.complete_at, run.batch)
        self._decide()

    def _entries(self) -> list[Entry[ResultT]]:
        return [entry for run in self._runs for entry in run.batch if not entry.done()]

    def _abort(self) -> list[asyncio.Task[Any]]:
        tasks = [run.owner for run in self._runs if run.owner is not None]
        entries = self._entries()
        self._runs, self._calling = set(), set()
        self._recorder.switch(False, self._clock())
        for entry in entries:
            self._end(entry, Closed(f"{type(self).__name__} was stopped while the record ran"))
        for task in tasks:
            task.cancel()
        return tasks

    def _close(self) -> None:
        super()._close()
        self._processor.close()
        self._delay.release()
        self._former.planned = []
        self._due_size = 0
