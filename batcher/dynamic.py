"""DynamicBatcher: collects records from many callers and runs them through one function, in batches."""

import asyncio
import contextvars
import functools
import time
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Literal, TypeVar

from batcher import checks
from batcher.admission import UNKNOWN_WAIT_S, Intake, State
from batcher.batch_delay import Company
from batcher.calls import ProcessCall, ProcessFn
from batcher.costs import CostEstimatorFn, CostRule
from batcher.entries import Ticket
from batcher.errors import BatcherError, Closed, Oversize, separate
from batcher.forming import FORMINGS, LOOKAHEAD_BATCHES, Former, Forming
from batcher.lifecycle import Lifecycle
from batcher.mapping import map_records
from batcher.processing import Processor
from batcher.queue import RequestQueue
from batcher.stats import BatchRecorder, BatchStats

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

OnError = Literal["split", "fail"]

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


class DynamicBatcher(Lifecycle, Generic[RecordT, ResultT]):
    """Runs records from many callers through one function, in batches::

        async with DynamicBatcher(process, target_batch_cost=8_000) as batcher:
            future = await batcher.submit(record)
            result = await future

    A batch is decided when `process_fn` is free, or when it is full: while `process_fn` runs, a partial
    batch stays open. Its records are taken in the order of `RequestQueue`.

    A lone record leaves at once, unless experience tells that others follow so soon and so many that
    waiting for them makes all of them faster.

    Args:
        process_fn: Takes a list of records and returns a sequence of as many results, in the same order;
            a result that is an exception fails its record. Runs in a thread unless it is `async def`.
        cost_estimator: Returns the cost of a record; otherwise the record's own `estimate_cost()` does.
        target_batch_cost: Most cost of a batch.
        max_batch_size: Most records in a batch.
        min_batch_size: Fewest records in a batch, unless the timeout has passed or the batcher stops.
        batch_timeout_s: Seconds that a record waits for company at most while `process_fn` is free.
        max_queue_size: Records that may wait.
        prefetch_batches: Full batches that are decided ahead while `process_fn` is busy, so that the next
            one starts without delay. A more urgent record can't pass them: 0 where that matters more.
        default_cost: Cost of a record of which nothing is known.
        max_queue_cost: Cost that may wait; None: no bound.
        max_concurrent_batches: Calls of `process_fn` that may run at once.
        forming: How batches are cut, see `Former`.
        lookahead: Records that are looked at to find some of like length; None: 16 batches.
        padded: The cost of a batch is that of its longest record times their number, not the sum.
        oversize: What becomes of a record that costs more than a whole batch may: "alone" runs it by
            itself, "reject" refuses it.
        on_error: When `process_fn` raises: "split" runs the halves of the batch, and so on, until the
            culprits are alone; "fail" fails every record of the batch.
        priority_aging_s: Seconds after which a class that waits passes the one a level above, for one
            record; None: never.
        tenant_weights: Share of a tenant in relation to the others; 1.0 where not given.
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
        if min_batch_size > max_batch_size:
            raise ValueError(
                f"min_batch_size must be at most max_batch_size={max_batch_size}, not {min_batch_size}"
            )
        checks.seconds("batch_timeout_s", batch_timeout_s)
        checks.whole("max_queue_size", max_queue_size, 1)
        checks.whole("prefetch_batches", prefetch_batches, 0)
        checks.whole("default_cost", default_cost, 0)
        if max_queue_cost is not None:
            checks.whole("max_queue_cost", max_queue_cost, 1)
        checks.whole("max_concurrent_batches", max_concurrent_batches, 1)
        checks.one_of("forming", forming, FORMINGS)
        if lookahead is not None:
            checks.whole("lookahead", lookahead, 1)
        checks.one_of("oversize", oversize, ("alone", "reject"))
        checks.one_of("on_error", on_error, ("split", "fail"))
        self._call = ProcessCall(process_fn, max_concurrent_batches, type(self).__name__)
        self._cost_of = CostRule(cost_estimator, self._cost_methods, default_cost)
        self._former = Former(
            forming,
            max_batch_size,
            target_batch_cost,
            padded,
            LOOKAHEAD_BATCHES * max_batch_size if lookahead is None else lookahead,
        )
        self._min_batch_size = max_batch_size if forming == "static" else min_batch_size
        self._timeout_s = batch_timeout_s
        self._company = Company(batch_timeout_s)
        self._max_queue_size = max_queue_size
        self._prefetch = prefetch_batches
        self._concurrency = max_concurrent_batches
        self._limit = target_batch_cost if oversize == "reject" else None
        self._clock = clock
        self._queue: RequestQueue[Ticket[ResultT]] = RequestQueue(
            clock=clock,
            max_size=max_queue_size,
            max_cost=max_queue_cost,
            priority_aging_s=priority_aging_s,
            tenant_weights=tenant_weights,
        )
        self._recorder: BatchRecorder = BatchRecorder()
        self._processor: Processor[ResultT] = Processor(
            self._call, on_error == "split", self._recorder, clock
        )
        self._intake = Intake(self, self._queue, self._recorder, clock)
        self._loop: asyncio.AbstractEventLoop
        self._context: contextvars.Context
        self._formed: deque[list[Ticket[ResultT]]] = deque()
        self._runs: set[_Run[ResultT]] = set()
        # The next look at a partial batch, how many records the last one saw, the quiet passes since, and
        # when nothing seemed to be arriving any more.
        self._look_handle: asyncio.Handle | None = None
        self._seen = 0
        self._quiet = 0
        self._complete_at: float | None = None

    @property
    def stats(self) -> BatchStats:
        """A snapshot, true at this moment."""
        recorder = self._recorder
        formed = [ticket for batch in self._formed for ticket in batch if not ticket.done()]
        running = [ticket for run in self._runs for ticket in run.batch if not ticket.done()]
        batches = recorder.batches or 1
        classes = self._queue.classes()
        for ticket in formed:
            records, cost = classes.get(ticket.priority, (0, 0))
            classes[ticket.priority] = (records + 1, cost + ticket.cost)
        return BatchStats(
            **recorder.common(self._clock()),  # type: ignore[arg-type]
            queue_depth=self._queue.size + len(formed),
            queue_cost=self._queue.cost + sum(ticket.cost for ticket in formed),
            queue_classes=classes,
            outside=self._intake.outside,
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
        self._loop = self.loop
        self._context = contextvars.copy_context()
        self._look_handle = None

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await super().stop(drain, timeout)
        if self._intake.state is State.STOPPED:
            self._call.close()

    async def submit(
        self,
        record: RecordT,
        *,
        estimated_cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> Ticket[ResultT]:
        """Queue one record and return the future of its result; waits while the queue is full.

        Args:
            record: What `process_fn` is given.
            estimated_cost: Its cost; None: found by `cost_estimator`, the record itself or `default_cost`.
            priority: Lower goes first.
            tenant: Whose record it is.
            deadline: Time on `clock` by which it must have started, or else fails with `Expired`.

        Raises:
            RuntimeError: The batcher isn't running (`Closed`).
            Oversize: It costs more than a whole batch may, and `oversize` is "reject".
            Expired: The deadline passed before there was room.
            ValueError: The cost is negative or not a number.
        """
        ticket = self._ticket(record, estimated_cost, priority, tenant, deadline)
        intake = self._intake
        if intake.full(ticket):
            await intake.enter_when_room(ticket)
        else:
            intake.put(ticket)
        if len(self._runs) < self._concurrency or len(self._formed) < self._prefetch:
            self._advance()
        return ticket

    def submit_nowait(
        self,
        record: RecordT,
        *,
        estimated_cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> Ticket[ResultT]:
        """Queue one record at once and return the future of its result.

        Args:
            record: What `process_fn` is given; the other arguments are those of `submit`.

        Raises:
            QueueFull: There is no room; says when to try again. And what `submit` raises.
        """
        ticket = self._ticket(record, estimated_cost, priority, tenant, deadline)
        self._intake.enter(ticket)
        self._advance()
        return ticket

    async def submit_batch(
        self,
        records: Iterable[RecordT],
        *,
        estimated_cost: Sequence[int] | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
    ) -> list[Ticket[ResultT]]:
        """Queue many records and return their futures, in the same order.

        If one is refused, those before it are cancelled.

        Args:
            records: What `process_fn` is given, each on its own; the other arguments are those of `submit`.
            estimated_cost: The cost of each; None: found as in `submit`.

        Raises:
            ValueError: There are not as many costs as records. And what `submit` raises.
        """
        records = list(records)
        costs: Sequence[int | None] = [None] * len(records) if estimated_cost is None else estimated_cost
        if len(costs) != len(records):
            raise ValueError(
                f"estimated_cost must have one cost for each of the {len(records)} records, not {len(costs)}"
            )
        tickets: list[Ticket[ResultT]] = []
        try:
            for record, cost in zip(records, costs, strict=True):
                tickets.append(
                    await self.submit(
                        record, estimated_cost=cost, priority=priority, tenant=tenant, deadline=deadline
                    )
                )
        except BaseException:
            for ticket in tickets:
                ticket.cancel()
            raise
        return tickets

    def map(
        self,
        records: Iterable[RecordT] | AsyncIterable[RecordT],
        *,
        ordered: bool = True,
        max_pending: int | None = None,
        return_exceptions: bool = False,
        priority: int = 0,
        tenant: str = "default",
    ) -> AsyncGenerator[ResultT | Exception, None]:
        """Process any number of records in bounded memory; iterate over the results with `async for`.

        Args:
            records: What `process_fn` is given, each on its own; read as they are needed.
            ordered: Results come in the order of `records`; False: as they are done.
            max_pending: Records that are submitted and whose results were not taken yet, at most; None:
                `max_queue_size`.
            return_exceptions: The error of a record takes the place of its result; False: it is raised,
                and what is still under way is cancelled.
            priority: Lower goes first.
            tenant: Whose records they are.
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

    def weigh(self, tenant: str, weight: float) -> None:
        """Give a tenant another weight than `tenant_weights` does, from now on.

        Raises:
            ValueError: The weight is no finite number above 0.
        """
        self._queue.weigh(tenant, weight)

    def estimate_wait(self, cost: int, priority: int = 0, tenant: str | None = None) -> float:
        """Return the seconds that a record submitted now would wait for its start.

        That is what is left of the batch that runs, and the batches before its own at their mean time.

        Args:
            cost: What the record costs.
            priority: Its class; what waits in lower classes doesn't count.
            tenant: Whose it is; None: it goes behind its whole class.
        """
        records, ahead = self._queue.ahead(priority, tenant)
        outside, outside_cost = self._intake.ahead(priority)
        records += outside
        ahead += outside_cost
        if len(self._runs) < self._concurrency and not records:
            return 0.0
        batch_s = self._company.batch_s
        if batch_s is None:
            return UNKNOWN_WAIT_S
        batches = len(self._formed) + self._former.batches(records, ahead + cost - 1)
        rest = 0.0
        if self._runs:
            rest = max(0.0, batch_s - (self._clock() - min(run.started for run in self._runs)))
        return (rest + batches * batch_s) / self._concurrency

    def _ticket(
        self, record: RecordT, cost: int | None, priority: int, tenant: str, deadline: float | None
    ) -> Ticket[ResultT]:
        intake = self._intake
        if intake.state is not State.RUNNING:
            raise intake.turn_away()
        if type(cost) is not int or cost < 0:
            cost = self._cost_of(record, cost)
        if self._limit is not None and cost > self._limit:
            self._recorder.rejected += 1
            raise Oversize(cost, self._limit)
        ticket: Ticket[ResultT] = Ticket(
            self, self._loop, record, cost, priority, tenant, deadline, self._clock()
        )
        if deadline is not None:
            intake.check_deadline(ticket)
        return ticket

    def _advance(self) -> None:
        """Start every batch that can start, and decide the full ones that come next."""
        queue = self._queue
        full = self._former.full
        while len(self._runs) < self._concurrency:
            if self._formed:
                self._launch(self._formed.popleft())
            elif full(queue.size, queue.cost) or (queue.size and self._intake.state is State.STOPPING):
                self._launch(self._cut())
            else:
                if queue.size and (self._look_handle is None or queue.size == self._min_batch_size):
                    self._look_soon()
                return
        while len(self._formed) < self._prefetch and full(queue.size, queue.cost):
            self._formed.append(self._cut())

    def _look_soon(self) -> None:
        if self._look_handle is not None:
            self._look_handle.cancel()
        self._quiet = 0
        self._complete_at = None
        self._look_handle = self._loop.call_soon(self._look)

    def _look(self) -> None:
        """Decide whether a partial batch leaves now."""
        self._look_handle = None
        if not self._queue.size or len(self._runs) >= self._concurrency:
            return
        self._quiet = self._quiet + 1 if self._seen == self._recorder.submitted else 0
        self._seen = self._recorder.submitted
        if self._quiet < QUIET_PASSES:
            self._look_handle = self._loop.call_soon(self._look)
            return
        patience = self._patience()
        if patience > 0:
            self._look_handle = self._loop.call_later(patience, self._look)
        else:
            self._launch(self._cut())
            self._advance()

    def _patience(self) -> float:
        """Return the seconds that a partial batch still waits for company."""
        now = self._clock()
        oldest = min(ticket.submitted_at for ticket in self._queue)
        if self._queue.size < self._min_batch_size:
            return oldest + self._timeout_s - now
        left = oldest + self._company.wait_s - now
        if self._complete_at is None and left > 0:
            self._complete_at = now
        return left if self._company.pays(self._queue.size) else 0.0

    def _cut(self) -> list[Ticket[ResultT]]:
        batch = self._former.cut(self._queue)
        self._intake.expire()
        self._intake.admit()
        return batch

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
        self._runs.add(run)
        work = self._processor.run(batch, functools.partial(self._leave, run))
        # The context of whoever happened to complete the batch has no business in `process_fn`.
        run.task = self._loop.create_task(work, context=self._context.copy())

    def _leave(self, run: _Run[ResultT]) -> None:
        """Make room for the next batch; a run that was given up has left already."""
        if run not in self._runs:
            return
        self._runs.remove(run)
        now = self._clock()
        if not self._runs:
            self._recorder.switch(False, now)
        arrivals = (ticket.submitted_at for tickets in (run.batch, self._queue) for ticket in tickets)
        self._company.learn(now - run.started, run.complete_at, arrivals)
        self._advance()
        self._intake.check_emptied()

    def _cancelled(self, ticket: Ticket[ResultT]) -> None:
        self._recorder.cancelled += 1
        if self._queue.remove(ticket):
            self._intake.admit()

    def _fail(self, ticket: Ticket[ResultT], error: BatcherError) -> None:
        ticket.fail(error)

    def _abandon(self, ticket: Ticket[ResultT]) -> None:
        ticket.cancel()

    def _idle(self) -> bool:
        return not self._runs and not self._formed

    def _drop_formed(self, error: BatcherError) -> None:
        while self._formed:
            self._processor.reject(self._formed.popleft(), separate(error))

    def _abort(self) -> list[asyncio.Task[Any]]:
        runs, self._runs = self._runs, set()
        self._recorder.switch(False, self._clock())
        tasks = [run.task for run in runs if run.task is not None]
        for run in runs:
            closed = Closed(f"{type(self).__name__} was stopped while the record ran")
            self._processor.reject(run.batch, closed)
        for task in tasks:
            task.cancel()
        return tasks
