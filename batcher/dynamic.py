"""DynamicBatcher: collects records from many callers and runs them through one function, in batches."""

import asyncio
import contextvars
import functools
import math
import time
from asyncio import _get_running_loop
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar, overload

from batcher import checks
from batcher.admission import LEAST_DELAY_S, UNKNOWN_WAIT_S, Batcher, State
from batcher.batch_delay import BatchDelay
from batcher.checks import LARGEST, PRIORITIES
from batcher.costs import CostEstimatorFn, CostRule, whole_cost
from batcher.entries import Ticket
from batcher.errors import LATE, BatcherError, Closed, Expired, Oversize
from batcher.forming import FORMINGS, LOOKAHEAD_BATCHES, Former, Forming
from batcher.mapping import map_records
from batcher.processing import ON_ERROR, OnError, ProcessCall, ProcessFn, Processor
from batcher.queue import RequestQueue
from batcher.stats import BatchStats

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")
ItemT = TypeVar("ItemT")

QUIET_PASSES = 3
"""Passes of the event loop without a new record after which nothing more is arriving just now.

What is sent together arrives within a few passes; an idle pass takes some ten microseconds.
"""


@dataclass(slots=True, eq=False)
class _Run(Generic[ResultT]):
    """A batch that runs; `complete_at` is when nothing more seemed to be coming and it could have waited."""

    batch: list[Ticket[ResultT]]
    started: float
    complete_at: float | None
    task: asyncio.Task[None] | None = None


class DynamicBatcher(Batcher[Ticket[ResultT]], Generic[RecordT, ResultT]):
    """Runs records from many callers through one function, in batches::

        async with DynamicBatcher(process, target_batch_cost=8_000) as batcher:
            future = await batcher.submit(record)
            result = await future

    A batch is decided when `process_fn` is free, or when it is full: while `process_fn` runs, a partial
    batch stays open. Its records are taken in the order of `RequestQueue`.

    A lone record leaves at once, unless experience tells that others follow so soon and so many that
    waiting for them makes all of them faster. `batch_timeout_s` is the most that it waits while
    `process_fn` is free.

    Args:
        process_fn: Takes a list of records and returns a sequence of as many results, in the same order;
            a result that is an exception fails its record. Runs in a thread unless it is `async def`.
        cost_estimator: Returns the cost of a record; otherwise the record's own `estimate_cost()` does.
        target_batch_cost: Most cost of a batch.
        max_batch_size: Most records in a batch.
        min_batch_size: Fewest records in a batch, unless the timeout has passed or the batcher stops.
        batch_timeout_s: Seconds that a record waits for others at most while `process_fn` is free.
        max_queue_size: Records that may wait; see `RequestQueue` for the part of a tenant.
        prefetch_batches: Full batches that are decided ahead while `process_fn` is busy, so that the next
            one starts without delay. A more urgent record can't pass them: 0 where that matters more.
        default_cost: Cost of a record without a cost of its own.
        max_queue_cost: Cost that may wait; None: no bound.
        max_concurrent_batches: Calls of `process_fn` that may run at once.
        forming: How batches are cut, see `Former`.
        lookahead: Records that are looked at to find some of like length; None: 16 batches.
        padded: The cost of a batch is that of its longest record times their number, not the sum.
        oversize: What becomes of a record that costs more than a whole batch may: "alone" runs it by
            itself, "reject" refuses it.
        on_error: What follows when `process_fn` raises. "split" runs parts of the batch again until the
            records that the error is due to are alone, see `Search` for how many calls that takes. "single"
            runs each record of the batch again by itself. "fail" fails every record of the batch: for
            functions that must not run twice on a record.
        priority_aging_s: See `RequestQueue`.
        tenant_weights: See `RequestQueue`.
        clock: Returns the time in seconds; deadlines are on it.

    Raises:
        ValueError: An argument is out of range, or two contradict each other.
        TypeError: A function is not callable.
    """

    _cost_methods: tuple[str, ...] = ("estimate_cost",)

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
        checks.whole("max_queue_size", max_queue_size, 1)
        for name, bound in (("max_batch_size", max_batch_size), ("max_queue_size", max_queue_size)):
            if min_batch_size > bound:
                raise ValueError(f"min_batch_size must be at most {name}={bound}, not {min_batch_size}")
        checks.seconds("batch_timeout_s", batch_timeout_s)
        checks.whole("prefetch_batches", prefetch_batches, 0)
        checks.whole("default_cost", default_cost, 0)
        if max_queue_cost is not None:
            checks.whole("max_queue_cost", max_queue_cost, 1)
        checks.whole("max_concurrent_batches", max_concurrent_batches, 1)
        checks.one_of("forming", forming, FORMINGS)
        checks.flag("padded", padded)
        if lookahead is not None:
            checks.whole("lookahead", lookahead, 1)
        checks.one_of("oversize", oversize, ("alone", "reject"))
        checks.one_of("on_error", on_error, ON_ERROR)
        queue: RequestQueue[Ticket[ResultT]] = RequestQueue(
            clock=clock,
            max_size=max_queue_size,
            max_cost=max_queue_cost,
            priority_aging_s=priority_aging_s,
            tenant_weights=tenant_weights,
        )
        super().__init__(queue, clock)
        self._call = ProcessCall(process_fn, max_concurrent_batches, type(self).__name__)
        self._cost_of = CostRule(cost_estimator, self._cost_methods, default_cost)
        self._processor: Processor[ResultT] = Processor(self._call, on_error, self._recorder, clock)
        self._former = Former(
            forming,
            max_batch_size,
            target_batch_cost,
            padded,
            LOOKAHEAD_BATCHES * max_batch_size if lookahead is None else lookahead,
        )
        self._min_batch_size = max_batch_size if forming == "static" else min_batch_size
        self._timeout_s = batch_timeout_s
        self._delay = BatchDelay(batch_timeout_s)
        self._max_queue_size = max_queue_size
        self._prefetch = prefetch_batches
        self._concurrency = max_concurrent_batches
        self._limit = target_batch_cost if oversize == "reject" else checks.LARGEST
        self._context: contextvars.Context
        self._withdraw = self._cancelled
        # Batches that run, and those of which the last records are about to end.
        self._runs: set[_Run[ResultT]] = set()
        self._ending: set[_Run[ResultT]] = set()
        # Full batches that are decided ahead, the earliest deadline in them, and the number of records that
        # have to come before there can be another.
        self._formed: deque[list[Ticket[ResultT]]] = deque()
        self._formed_due = math.inf
        self._form_at = 0
        # The next look at a partial batch, when it has to leave, how many records had come by the last look,
        # the quiet passes since, and when nothing seemed to be arriving any more.
        self._look_handle: asyncio.Handle | None = None
        self._look_by = 0.0
        self._seen = 0
        self._quiet = 0
        self._complete_at: float | None = None

    @property
    def stats(self) -> BatchStats:
        """A snapshot, true at this moment."""
        recorder, queue = self._recorder, self._queue
        formed = [ticket for batch in self._formed for ticket in batch if not ticket.done()]
        runs = (*self._runs, *self._ending)
        running = [ticket for run in runs for ticket in run.batch if not ticket.done()]
        batches = recorder.batches or 1
        classes = queue.classes()
        for ticket in formed:
            records, cost = classes.get(ticket.priority, (0, 0))
            classes[ticket.priority] = (records + 1, cost + ticket.cost)
        return BatchStats(
            **recorder.common(self._clock()),  # type: ignore[arg-type]
            total_submitted=queue.entered,
            queue_depth=queue.size + len(formed),
            queue_cost=queue.cost + sum(ticket.cost for ticket in formed),
            queue_classes=classes,
            outside=queue.outside,
            running=len(running),
            running_cost=sum(ticket.cost for ticket in running),
            total_batches=recorder.batches,
            total_batch_cost=recorder.batch_cost,
            total_padded_cost=recorder.padded_cost,
            avg_batch_size=recorder.batch_records / batches,
            avg_batch_cost=recorder.batch_cost / batches,
            padding_ratio=1 - recorder.batch_cost / recorder.padded_cost if recorder.padded_cost else 0.0,
        )

    async def start(self) -> None:
        await super().start()
        self._call.open()
        self._context = contextvars.copy_context()
        self._look_handle = None

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await super().stop(drain, timeout)
        if self._state is State.STOPPED:
            self._call.close()

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
    ) -> Ticket[ResultT]:
        """Queue one record at once and return the future of its result.

        Args:
            record: What `process_fn` is given.
            cost: Its cost; None: found by `cost_estimator`, the record itself or `default_cost`.
            priority: Its tier; lower goes first.
            tenant: The name of its tenant.
            deadline: Time on `clock` by which it must have started, or else fails with `Expired`.
            timeout: The same in seconds from now.
            estimated_cost: Another name for `cost`.

        Raises:
            QueueFull: There is no space; says when to try again.
            RuntimeError: The batcher isn't running (`Closed`), or runs on another event loop.
            Oversize: It costs more than a whole batch may, and `oversize` is "reject".
            Expired: The deadline has passed.
            ValueError: A number is out of range.
            TypeError: The tenant is not a string.
        """
        return self._submit(record, cost, priority, tenant, deadline, timeout, estimated_cost, False)

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
    ) -> Ticket[ResultT]:
        """Queue one record and return the future of its result; waits while the queue is full.

        While it waits for space, the record has its place in the order already.

        Args:
            record: What `process_fn` is given; the other arguments are those of `submit_nowait`.

        Raises:
            Expired: The deadline passed before there was space. And what `submit_nowait` raises, but for
                `QueueFull`.
        """
        ticket = self._submit(record, cost, priority, tenant, deadline, timeout, estimated_cost, True)
        if not ticket.admitted:
            await self._wait_for_space(ticket, lambda _: ticket.cancel())
        return ticket

    async def submit_batch(
        self,
        records: Iterable[RecordT],
        *,
        cost: Sequence[int] | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of the records, not of this call
        estimated_cost: Sequence[int] | None = None,
    ) -> list[Ticket[ResultT]]:
        """Queue many records and return their futures, in the same order.

        If one is refused, those before it are cancelled.

        Args:
            records: What `process_fn` is given, each on its own; the other arguments are those of `submit`.
            cost: The cost of each; None: found as in `submit`.
            estimated_cost: Another name for `cost`.

        Raises:
            ValueError: There are not as many costs as records. And what `submit` raises.
        """
        records = list(records)
        _either(cost, estimated_cost)
        costs = {"cost": cost, "estimated_cost": estimated_cost}
        for name, given in costs.items():
            if given is not None and len(given) != len(records):
                raise ValueError(
                    f"{name} must have one cost for each of the {len(records)} records, not {len(given)}"
                )
        if timeout is not None:
            deadline = self._deadline(deadline, timeout, self._clock())
        tickets: list[Ticket[ResultT]] = []
        try:
            for index, record in enumerate(records):
                one = {name: given[index] for name, given in costs.items() if given is not None}
                tickets.append(
                    await self.submit(record, **one, priority=priority, tenant=tenant, deadline=deadline)
                )
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    @overload
    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = ...,
        max_pending: int | None = ...,
        return_exceptions: Literal[False] = ...,
        priority: int = ...,
        tenant: str = ...,
    ) -> AsyncGenerator[ResultT, None]: ...

    @overload
    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = ...,
        max_pending: int | None = ...,
        return_exceptions: bool,
        priority: int = ...,
        tenant: str = ...,
    ) -> AsyncGenerator[ResultT | Exception, None]: ...

    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = True,
        max_pending: int | None = None,
        return_exceptions: bool = False,
        priority: int = 0,
        tenant: str = "default",
    ) -> AsyncGenerator[Any, None]:
        """Process any number of records in bounded memory; iterate over the results with `async for`.

        Args:
            records: What `process_fn` is given, each on its own; read as they are needed.
            ordered: Results come in the order of `records`; False: as they are done.
            max_pending: Records that are submitted and whose results were not taken yet, at most; None:
                `max_queue_size`.
            return_exceptions: The error of a record takes the place of its result; False: it is raised,
                and what is still under way is cancelled.
            priority: The tier of the records; lower goes first.
            tenant: The name of their tenant.

        Raises:
            ValueError: A number is out of range.
        """
        if max_pending is None:
            max_pending = self._max_queue_size
        checks.whole("max_pending", max_pending, 1)
        return map_records(
            functools.partial(self.submit, priority=priority, tenant=tenant),
            records,
            ordered=ordered,
            max_pending=max_pending,
            return_exceptions=return_exceptions,
        )

    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        # The time until `process_fn` is free, and the batches before its own at their mean time.
        before, ahead = self._queue.ahead(priority, tenant)
        if len(self._runs) < self._concurrency and not before:
            return 0.0
        batch_s = self._delay.batch_s
        if batch_s is None:
            return UNKNOWN_WAIT_S
        batches = len(self._formed) + self._former.batches(before + records - 1, ahead + cost - 1)
        rest = 0.0
        if len(self._runs) >= self._concurrency:
            rest = max(0.0, batch_s - (self._clock() - min(run.started for run in self._runs)))
        return rest + batches * batch_s / self._concurrency

    def _submit(
        self,
        record: RecordT,
        cost: int | None,
        priority: int,
        tenant: str,
        deadline: float | None,
        timeout: float | None,
        estimated_cost: int | None,
        wait: bool,
    ) -> Ticket[ResultT]:
        if self._state is not State.RUNNING or _get_running_loop() is not self._loop:
            self._check_open()
        name = "cost"
        if estimated_cost is not None:
            name, cost = "estimated_cost", _either(cost, estimated_cost)
        if type(cost) is not int or not 0 <= cost <= LARGEST:
            cost = self._cost_of(record) if cost is None else whole_cost(name, cost)
        if type(tenant) is not str or type(priority) is not int or not -PRIORITIES <= priority <= PRIORITIES:
            checks.order(priority, tenant)
        now = self._clock()
        if deadline is not None or timeout is not None:
            deadline = self._deadline(deadline, timeout, now)
        if cost > self._limit:
            self._recorder.rejected += 1
            raise Oversize(cost, self._limit)
        ticket: Ticket[ResultT] = Ticket(
            self._withdraw, self._loop, record, cost, priority, tenant, deadline, now
        )
        self._enter(ticket, wait)
        return ticket

    # Batches

    def _unchanged(self) -> bool:
        queue, former = self._queue, self._former
        total = queue.total
        if len(self._runs) < self._concurrency:
            if self._look_handle is None or total == self._min_batch_size:
                return False
        elif len(self._formed) >= self._prefetch:
            return True
        return total < former.max_records and (queue.total_cost < former.budget or not former.by_cost)

    def _start_ready(self) -> None:
        """Start every batch that can start, and decide the full ones that come next."""
        queue, former = self._queue, self._former
        if self._formed_due < math.inf:
            self._expire_formed()
        while len(self._runs) < self._concurrency:
            if self._formed:
                self._launch(self._formed.popleft())
            elif queue.total and (
                former.full(queue.total, queue.total_cost) or self._state is State.STOPPING
            ):
                self._launch(self._cut())
            else:
                if queue.total and (self._look_handle is None or queue.total == self._min_batch_size):
                    self._look_soon()
                return
        while (
            len(self._formed) < self._prefetch
            and queue.entered >= self._form_at
            and former.full(queue.total, queue.total_cost)
        ):
            self._form()

    def _cut(self) -> list[Ticket[ResultT]]:
        """Take the next batch; what was found too late on the way ends."""
        batch = self._former.cut(self._queue)
        self._end_late()
        return batch

    def _form(self) -> None:
        """Decide the next batch ahead, if it is full."""
        batch, lacks = self._former.cut_full(self._queue)
        self._end_late()
        if not batch:
            self._form_at = self._queue.entered + lacks
            return
        self._formed.append(batch)
        for ticket in batch:
            if ticket.deadline is not None and ticket.deadline < self._formed_due:
                self._formed_due = ticket.deadline

    def _launch(self, batch: list[Ticket[ResultT]]) -> None:
        if not batch:
            return
        if self._look_handle is not None:
            self._look_handle.cancel()
            self._look_handle = None
        now = self._clock()
        if not self._runs:
            self._recorder.switch(True, now)
        run = _Run(batch, now, self._complete_at)
        self._complete_at = None
        self._form_at = 0
        self._runs.add(run)
        work = self._processor.run(batch, functools.partial(self._leave, run))
        # `process_fn` doesn't run in the context of the caller that happened to complete the batch.
        run.task = self.loop.create_task(work, context=self._context.copy())

    def _leave(self, run: _Run[ResultT], typical: bool, ended: bool) -> None:
        """Make space for the next batch; a run that was given up has left already."""
        if ended:
            self._ending.discard(run)
        if run not in self._runs:
            return
        self._runs.remove(run)
        if not ended:
            self._ending.add(run)
        now = self._clock()
        if not self._runs:
            self._recorder.switch(False, now)
        if typical:
            arrivals = (ticket.submitted_at for tickets in (run.batch, self._queue) for ticket in tickets)
            self._delay.learn(now - run.started, run.complete_at, arrivals)
        self._decide()

    # A partial batch

    def _look_soon(self) -> None:
        if self._look_handle is not None:
            self._look_handle.cancel()
        self._quiet = 0
        self._complete_at = None
        self._look_by = min(ticket.submitted_at for ticket in self._queue) + self._timeout_s
        self._look_handle = self.loop.call_soon(self._look)

    def _look(self) -> None:
        """Decide whether a partial batch leaves now."""
        self._look_handle = None
        queue = self._queue
        if not queue.total or len(self._runs) >= self._concurrency:
            return
        self._quiet = self._quiet + 1 if self._seen == queue.entered else 0
        self._seen = queue.entered
        if self._quiet < QUIET_PASSES and self._clock() < self._look_by:
            self._look_handle = self.loop.call_soon(self._look)
            return
        patience = self._patience()
        if patience > 0:
            self._look_handle = self.loop.call_later(max(LEAST_DELAY_S, patience), self._look)
        else:
            self._launch(self._cut())
            self._decide()

    def _patience(self) -> float:
        """Return the seconds that a partial batch still waits for others."""
        now = self._clock()
        oldest = min(ticket.submitted_at for ticket in self._queue)
        if self._queue.total < self._min_batch_size:
            return oldest + self._timeout_s - now
        left = oldest + self._delay.wait_s - now
        if self._complete_at is None and left > 0:
            self._complete_at = now
        return left if self._delay.pays(self._queue.total) else 0.0

    # Records that leave

    def _cancelled(self, ticket: Ticket[ResultT]) -> None:
        if ticket.admitted:
            self._recorder.cancelled += 1
        if self._queue.remove(ticket):
            self._decide()

    def _tell(self, entry: Ticket[ResultT], error: BatcherError) -> None:
        if not entry.admitted:
            super()._tell(entry, error)
        elif not entry.done():
            entry.fail(error)
            if isinstance(error, Closed):
                # Python reports errors that are not looked at; of those that a stop ends, few are.
                entry.exception()

    def _next_due(self) -> float | None:
        due = self._queue.next_deadline()
        if self._formed_due == math.inf:
            return due
        return self._formed_due if due is None else min(due, self._formed_due)

    def _expire_formed(self) -> None:
        """End what comes too late of the batches that were decided ahead."""
        now = self._clock()
        if now < self._formed_due:
            return
        self._formed_due = math.inf
        for ticket in (ticket for batch in self._formed for ticket in batch if not ticket.done()):
            if ticket.deadline is None:
                continue
            if ticket.deadline <= now:
                self._end(ticket, Expired(LATE))
            else:
                self._formed_due = min(self._formed_due, ticket.deadline)

    def _refuse_all(self) -> None:
        super()._refuse_all()
        message = f"{type(self).__name__} was stopped before the record could start"
        while self._formed:
            self._close_records(self._formed.popleft(), message)
        self._formed_due = math.inf

    def _close_records(self, batch: list[Ticket[ResultT]], message: str) -> None:
        for ticket in batch:
            if not ticket.done():
                self._end(ticket, Closed(message))

    def _idle(self) -> bool:
        return not self._runs and not self._formed

    def _waits_for(self, task: asyncio.Task[Any] | None) -> bool:
        return any(run.task is task for run in self._runs)

    def _abort(self) -> list[asyncio.Task[Any]]:
        runs, self._runs = self._runs, set()
        self._recorder.switch(False, self._clock())
        tasks = [run.task for run in runs if run.task is not None]
        for run in runs:
            self._close_records(run.batch, f"{type(self).__name__} was stopped while the record ran")
        for task in tasks:
            task.cancel()
        return tasks

    def _abandon(self) -> None:
        left = [*self._formed, *(run.batch for run in self._runs)]
        self._recorder.failed += sum(not ticket.done() for batch in left for ticket in batch)
        self._formed.clear()
        self._formed_due = math.inf
        self._runs.clear()
        self._ending.clear()
        self._recorder.switch(False, self._clock())
        self._look_handle = None


def _either(cost: ItemT | None, estimated_cost: ItemT | None) -> ItemT | None:
    """Return what was given as a cost, under either name."""
    if cost is not None and estimated_cost is not None:
        raise ValueError("give either cost or estimated_cost: they are two names for one thing")
    return estimated_cost if cost is None else cost
