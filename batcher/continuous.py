"""ContinuousBatcher: a window of in-flight cost in front of an engine that batches for itself."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from types import EllipsisType
from typing import Any, Literal, Self, TypeVar

from batcher import checks
from batcher.admission import UNKNOWN_WAIT_S, Batcher
from batcher.background import BACKGROUND, Background
from batcher.costs import OutputEstimator, whole_cost
from batcher.entries import Queued
from batcher.errors import Aborted, BatcherError, Expired, Oversize
from batcher.queue import RequestQueue
from batcher.rates import ServiceRate, Standby
from batcher.slo import Goals
from batcher.stats import RECENT, ContinuousStats, Observation, Outcome

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

HOPELESS = 2.0
"""A wait that is estimated as so many times what a deadline leaves is not begun."""

Policy = Literal["guaranteed_no_evict", "max_utilization"]
OversizePolicy = Literal["reject", "alone"]


@dataclass(slots=True, eq=False)
class Slot(Queued):
    """The place of one record in the window, or of several; `async with` waits for it and gives it back.

    Attributes:
        cost: What it holds of the capacity now.
        charged: What its tenant was charged for it.
        running: Whether it is in the window.
        owner: The task that holds it.
        started_at: Time at which it started.
        first_at: Time of its first token; 0 before.
        waited_s: Seconds from submission to start.
        output_tokens: Tokens reported so far.
        turn: Future of the caller that waits for it to start.
    """

    _batcher: "ContinuousBatcher"
    cost: int
    priority: int
    tenant: str
    deadline: float | None
    wait: bool
    prompt_tokens: int | None
    max_tokens: int | None
    records: int = 1
    output_tokens: int = 0
    submitted_at: float = 0.0
    started_at: float = 0.0
    first_at: float = 0.0
    waited_s: float = 0.0
    charged: int = 0
    used: bool = False
    admitted: bool = False
    running: bool = False
    owner: asyncio.Task[Any] | None = None
    refusal: BatcherError | None = None
    space: asyncio.Future[None] | None = None
    turn: asyncio.Future[None] | None = None
    _place: Any = None

    async def __aenter__(self) -> Self:
        await self._batcher._enter_and_wait(self)
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._batcher._leave(self, error)

    def release(self) -> None:
        """Give the place back before the block ends; more than once does no harm.

        A caller that waits to enter the slot gets `Aborted`.
        """
        self._batcher._leave(self, None)

    def first_token(self) -> None:
        """Tell that the first token is there, for goals to be held against."""
        self._batcher._first_token(self)

    def report(self, output_tokens: int) -> None:
        """Tell how many tokens the record has produced so far.

        With `max_utilization` a record that outgrows what was reserved for it reserves more, even beyond
        the capacity: nothing new starts until the window has space again.

        Args:
            output_tokens: Tokens in all, of all its records, not since the last report.

        Raises:
            ValueError: It is not a whole number of at least 0.
        """
        if type(output_tokens) is not int or not 0 <= output_tokens <= checks.LARGEST:
            checks.whole("output_tokens", output_tokens, 0)
        self.output_tokens = output_tokens
        if self.prompt_tokens is not None and self.running and self.prompt_tokens + output_tokens > self.cost:
            self._batcher._outgrown(self)


class ContinuousBatcher(Batcher[Slot]):
    """Admits records to an engine that batches continuously, by what they cost.

    A record starts when its cost fits into what is left of `capacity`, in the order of `RequestQueue`,
    and leaves when its block ends. A batch is never frozen::

        async with ContinuousBatcher(capacity=40_000) as batcher:
            async with batcher.slot(len(prompt) + max_tokens, tenant=user):
                ...

    Args:
        capacity: Cost that may run at once, in tokens of KV cache for an LLM.
        max_running: Records that may run at once; None: no bound but `places`. A slot of more records than
            either is refused.
        places: Records in one step of the engine, which queues what is beyond. So many run, and a few
            more that wait in the engine for the places of those that end; see `Standby`. None: the engine
            has no such limit.
        max_queue_size: Records that may wait; see `RequestQueue` for the part of a tenant.
        max_queue_cost: Cost that may wait; None: no bound.
        policy: What a record reserves when it names `prompt_tokens` and `max_tokens`.
            "guaranteed_no_evict": both, so what runs can always finish. "max_utilization": the prompt
            and the output that finished requests lead to expect, corrected by `Slot.report`.
        oversize: What becomes of a record that costs more than the capacity: "reject" refuses it,
            "alone" lets it run with nothing beside it.
        priority_aging_s: See `RequestQueue`.
        tenant_weights: See `RequestQueue`.
        goals: Goals of the foreground, that is the tiers before `background`. The others then run as many
            as that allows, and leave space for it; see `Background`. It takes `step` and
            `Slot.first_token` to know. None: all tiers share the window.
        background: The priority from which on records are background, where there are goals.
        clock: Returns the time in seconds; deadlines are on it.

    Raises:
        ValueError: An argument is out of range.
    """

    def __init__(
        self,
        *,
        capacity: int,
        max_running: int | None = None,
        places: int | None = None,
        max_queue_size: int = 5_000,
        max_queue_cost: int | None = None,
        policy: Policy = "guaranteed_no_evict",
        oversize: OversizePolicy = "reject",
        priority_aging_s: float | None = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
        goals: Goals | None = None,
        background: int = BACKGROUND,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checks.whole("max_queue_size", max_queue_size, 1)
        if places is not None:
            checks.whole("places", places, 1)
        if max_queue_cost is not None:
            checks.whole("max_queue_cost", max_queue_cost, 1)
        checks.whole("background", background, -checks.PRIORITIES, checks.PRIORITIES)
        checks.one_of("policy", policy, ("guaranteed_no_evict", "max_utilization"))
        checks.one_of("oversize", oversize, ("reject", "alone"))
        queue: RequestQueue[Slot] = RequestQueue(
            clock=clock,
            max_size=max_queue_size,
            max_cost=max_queue_cost,
            priority_aging_s=priority_aging_s,
            tenant_weights=tenant_weights,
            background=None if goals is None else background,
        )
        super().__init__(queue, clock)
        self._learns = policy == "max_utilization"
        self._alone = oversize == "alone"
        self._outputs = OutputEstimator()
        self._background = None if goals is None else Background(goals, background, clock)
        self._rate = ServiceRate()
        self._background_rate = ServiceRate()
        self._standby = None if places is None else Standby(places)
        self._capacity = self._max_running = 1
        self._running: set[Slot] = set()
        self._running_records = 0
        self._running_cost = 0
        self._tasks: dict[asyncio.Task[Any], Slot] = {}
        self.set_capacity(capacity, max_running=max_running)

    @property
    def capacity(self) -> int:
        """Cost that may run at once."""
        return self._capacity

    @property
    def stats(self) -> ContinuousStats:
        """A snapshot, true at this moment."""
        now = self._clock()
        background, queue = self._background, self._queue
        return ContinuousStats(
            **self._recorder.common(now),  # type: ignore[arg-type]
            total_submitted=queue.entered,
            queue_depth=queue.size,
            queue_cost=queue.cost,
            queue_classes=queue.classes(),
            running=self._running_records,
            running_cost=self._running_cost,
            capacity=self._capacity,
            max_running=None if (regular := self._regular()) == sys.maxsize else regular,
            occupancy=self._recorder.occupancy(now),
            outside=queue.outside,
            outside_cost=queue.outside_cost,
            output_tokens=self._recorder.output_tokens,
            background_running=0 if background is None else background.running,
            background_window=None if background is None else background.window.records,
            goal_ttft_s=None if background is None else background.window.goals.ttft_p99_s,
            expected_ttft_s=None if background is None else background.window.expected_ttft_s(),
        )

    def slot(
        self,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        wait: bool = False,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        records: int = 1,
    ) -> Slot:
        """Return the place of one record, to be entered with `async with`.

        Entering raises `QueueFull`, `Oversize`, `Expired` or `Closed`.

        A slot may stand for several records that start together. It takes as many places in the window and
        in the queue; its cost and its tokens are those of all of them.

        Args:
            cost: What the record holds while it runs; or else `prompt_tokens` and `max_tokens`.
            priority: Its tier; lower goes first.
            tenant: The name of its tenant.
            deadline: Time on `clock` by which it must have started.
            wait: Wait for space when the queue is full; False: entering raises `QueueFull`, as suits a
                server that can answer at once.
            prompt_tokens: Tokens of the prompt.
            max_tokens: The most tokens that may be produced.
            timeout: The deadline in seconds from now.
            records: Records that the slot stands for.

        Raises:
            ValueError: Neither or both ways of giving a cost are used, or a number is out of range.
            TypeError: The tenant is not a string.
            Expired: The deadline has passed.
        """
        checks.order(priority, tenant, records)
        if prompt_tokens is None or max_tokens is None:
            if cost is None or prompt_tokens is not None or max_tokens is not None:
                raise ValueError("give either cost, or both prompt_tokens and max_tokens")
            if type(cost) is not int or not 0 <= cost <= checks.LARGEST:
                cost = whole_cost("cost", cost)
        elif cost is not None:
            raise ValueError("give either cost, or both prompt_tokens and max_tokens")
        else:
            prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
            max_tokens = whole_cost("max_tokens", max_tokens)
            cost = prompt_tokens + (self._expected(max_tokens, records) if self._learns else max_tokens)
        if timeout is not None:
            deadline = self._deadline(deadline, timeout, self._clock(), records)
        elif deadline is not None:
            checks.instant("deadline", deadline)
        return Slot(self, cost, priority, tenant, deadline, wait, prompt_tokens, max_tokens, records)

    async def submit(
        self,
        process_fn: Callable[[RecordT], Awaitable[ResultT]],
        record: RecordT,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        wait: bool = True,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,  # noqa: ASYNC109 - of the record, not of this call
        records: int = 1,
    ) -> asyncio.Task[ResultT]:
        """Queue one record and return the task that will run `process_fn(record)` in a slot.

        Returns once the record is admitted to the queue. Cancelling the task takes the record out of the
        queue, or cancels `process_fn` if it runs.

        Args:
            process_fn: Processes one record.
            record: What it is given.
            cost: As for `slot`, like everything that follows but `wait`.
            wait: Wait for space when the queue is full; False: raise `QueueFull`.

        Raises:
            QueueFull: The queue is full and `wait` is False.
            Oversize: The record can never run.
            Expired: The deadline passed before there was space.
            RuntimeError: The batcher isn't running (`Closed`), or runs on another event loop.
            ValueError: A number is out of range.
            TypeError: The tenant is not a string, or `process_fn` is not a function.
        """
        checks.function("process_fn", process_fn)
        slot = self.slot(
            cost,
            priority,
            tenant,
            deadline,
            wait,
            prompt_tokens=prompt_tokens,
            max_tokens=max_tokens,
            timeout=timeout,
            records=records,
        )
        self._enter_nowait(slot)
        if not slot.admitted:
            await self._wait_for_space(slot, lambda error: self._leave(slot, error))
        task = self.loop.create_task(self._process(process_fn, record, slot))
        if not task.done():
            self._tasks[task] = slot
            task.add_done_callback(self._forget)
        return task

    def set_capacity(self, capacity: int, max_running: int | EllipsisType | None = ...) -> None:
        """Change what may run at once, also while records run.

        When it shrinks, what runs goes on; what waits and can no longer run fails with `Oversize`, but for
        what costs too much with `oversize="alone"`.

        Args:
            capacity: Cost that may run at once.
            max_running: Records that may run at once; None: no bound but the engine's places; left out: as
                many as before.

        Raises:
            ValueError: A number is out of range.
        """
        checks.whole("capacity", capacity, 1)
        if max_running is None:
            self._max_running = sys.maxsize
        elif not isinstance(max_running, EllipsisType):
            checks.whole("max_running", max_running, 1)
            self._max_running = max_running
        self._capacity = capacity
        self._recorder.fill(self._running_cost / capacity, self._clock())
        for slot, error in [(slot, self._oversize(slot)) for slot in self._queue]:
            if error is None:
                continue
            self._queue.remove(slot)
            self._end(slot, error)
        if self._loop is not None:
            self._decide()

    def step(self, seconds: float) -> None:
        """Take in how long a step of the engine took, for goals to be held; without goals it does nothing.

        Raises:
            ValueError: It is not a time.
        """
        background = self._background
        if background is None:
            return
        checks.seconds("seconds", seconds)
        if background.step(seconds) and self._queue.total:
            self._decide()

    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        # Records that wait before it are served first, less those that free space takes.
        free = self._capacity - self._running_cost
        places = self._most() - self._running_records
        running, running_cost, rate = self._running_records, self._running_cost, self._rate
        background = self._background
        if background is not None and priority >= background.priority:
            most, most_cost = background.places(self._capacity, self._regular())
            running, running_cost, rate = background.running, background.cost, self._background_rate
            places, free = min(places, most - running), min(free, most_cost - running_cost)
        before, ahead = self._queue.ahead(priority, tenant)
        if not before and cost <= free and places >= records:
            return 0.0
        wait = rate.time_to_serve(
            before + records - max(places, 0), ahead + cost - max(free, 0), running, running_cost
        )
        return UNKNOWN_WAIT_S if wait is None else wait

    # Coming

    async def _enter_and_wait(self, slot: Slot) -> None:
        """Enter a slot and wait until it starts."""
        self._enter_nowait(slot)
        slot.owner = asyncio.current_task()
        await self._wait_for_turn(slot)

    def _enter_nowait(self, slot: Slot) -> None:
        """Start a slot if it may start; otherwise it waits in the queue, or for space in it.

        Raises:
            BatcherError: It is refused.
        """
        if slot.used:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        self._check_open(slot.records)
        slot.used = True
        if (oversize := self._oversize(slot)) is not None:
            self._recorder.rejected += slot.records
            raise oversize
        now = slot.submitted_at = self._clock()
        if slot.deadline is not None:
            self._deadline(slot.deadline, None, now, slot.records)
            wait = 0.0
            if self._rate.known:
                wait = self.estimate_wait(slot.cost, slot.priority, slot.tenant, records=slot.records)
            if wait > HOPELESS * (slot.deadline - now):
                self._recorder.rejected += slot.records
                raise Expired(f"the record could not start for about {wait:.1f} s, after its deadline")
        if not self._queue.total and self._fits(slot) and not self._held_back(slot):
            self._queue.pass_by(slot)
            self._begin(slot)
        else:
            self._enter(slot, slot.wait)

    def _oversize(self, slot: Slot) -> Oversize | None:
        """Return why a slot can never start, if it can't."""
        if slot.cost > self._capacity and not self._alone:
            return Oversize(slot.cost, self._capacity)
        if slot.records > 1 and slot.records > (most := self._regular()):
            return Oversize(slot.records, most, "max_running" if most == self._max_running else "places")
        return None

    async def _wait_for_turn(self, slot: Slot) -> None:
        """Wait until a slot that waits starts."""
        if slot.running:
            return
        if slot.refusal is None:
            slot.turn = self.loop.create_future()
            try:
                await slot.turn
            except asyncio.CancelledError as error:
                self._leave(slot, error)
                raise
        if slot.refusal is not None:
            raise slot.refusal

    async def _process(
        self, process_fn: Callable[[RecordT], Awaitable[ResultT]], record: RecordT, slot: Slot
    ) -> ResultT:
        slot.owner = asyncio.current_task()
        await self._wait_for_turn(slot)
        try:
            result = await process_fn(record)
        except BaseException as error:
            self._leave(slot, error)
            raise
        self._leave(slot, None)
        return result

    # The window

    def _start_ready(self) -> None:
        """Start the slots whose turn it is, as long as they fit."""
        queue = self._queue
        while (slot := self._next()) is not None:
            if slot.turn is not None and slot.turn.done():
                # Its task was cancelled and has not run since.
                queue.remove(slot)
                if slot.admitted:
                    self._recorder.cancelled += slot.records
            elif self._fits(slot):
                queue.pick(slot)
                slot.charged = slot.cost
                self._begin(slot)
                if slot.turn is not None:
                    slot.turn.set_result(None)
            else:
                break
        self._end_late()

    def _next(self) -> Slot | None:
        """Return the slot whose turn it is; where the background is held back, that of the others."""
        slot = self._queue.head()
        if slot is None or self._background is None or not self._held_back(slot):
            return slot
        return self._queue.head(before=self._background.priority)

    def _held_back(self, slot: Slot) -> bool:
        background = self._background
        if background is None or slot.priority < background.priority:
            return False
        return not background.admits(slot.cost, slot.records, self._capacity, self._regular())

    def _regular(self) -> int:
        """Return how many records may run, without those that wait in the engine."""
        standby = self._standby
        return self._max_running if standby is None else min(self._max_running, standby.places)

    def _most(self) -> int:
        """Return how many records may run, with those that wait in the engine."""
        standby = self._standby
        if standby is None:
            return self._max_running
        return min(self._max_running, standby.places + standby.records)

    def _fits(self, slot: Slot) -> bool:
        if not self._running:
            return True
        records, cost = self._running_records + slot.records, self._running_cost + slot.cost
        return records <= self._most() and cost <= self._capacity

    def _begin(self, slot: Slot) -> None:
        now = slot.started_at = self._clock()
        slot.waited_s = now - slot.submitted_at
        slot.running = True
        if not self._running:
            self._recorder.switch(True, now)
        self._running.add(slot)
        self._running_records += slot.records
        self._running_cost += slot.cost
        self._recorder.fill(self._running_cost / self._capacity, now)
        if (background := self._background) is not None:
            prompt = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens
            background.begin(slot.priority >= background.priority, slot.cost, slot.records, prompt)

    def _leave(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out, wherever it is; one that has left already is left alone."""
        if slot.running:
            self._finish(slot, error)
        elif self._queue.remove(slot):
            if slot.admitted:
                self._recorder.cancelled += slot.records
            # It was released while its caller waits for it.
            self._tell(slot, Aborted("the slot was released before it started"))
        else:
            return
        self._decide()

    def _finish(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out of the window, and count how it ended."""
        slot.running = False
        slot.owner = None
        now = self._clock()
        self._running.remove(slot)
        self._running_records -= slot.records
        self._running_cost -= slot.cost
        self._recorder.fill(self._running_cost / self._capacity, now)
        if not self._running:
            self._recorder.switch(False, now)
        run, finished = now - slot.started_at, error is None
        recorder, records = self._recorder, slot.records
        recorder.ran += records
        recorder.run_s += records * run
        recorder.waits += [slot.waited_s] * min(records, RECENT)
        recorder.runs += [run] * min(records, RECENT)
        outcome: Outcome = "failed"
        if error is None:
            outcome = "completed"
            recorder.completed += records
            recorder.completed_cost += slot.cost
            recorder.latency_s += records * (slot.waited_s + run)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = "cancelled"
            recorder.cancelled += records
        else:
            recorder.failed += records
        if recorder.observations is not None:
            used = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens + slot.output_tokens
            for number in range(records):
                part = used * (number + 1) // records - used * number // records
                recorder.observations.records.append(
                    Observation(slot.tenant, slot.priority, part, slot.waited_s, run, outcome)
                )
        # Figures that the estimates for later records use.
        if finished and self._standby is not None:
            self._standby.learn(slot.output_tokens, slot.records)
        self._rate.learn(slot.cost, run, slot.records)
        if (background := self._background) is not None:
            behind = slot.priority >= background.priority
            background.end(behind, slot.cost, slot.records, run)
            if behind:
                self._background_rate.learn(slot.cost, run, slot.records)
            elif slot.first_at and slot.output_tokens > slot.records:
                per_record = slot.output_tokens / slot.records
                background.window.answered((now - slot.first_at) / (per_record - 1))
        if slot.output_tokens and slot.prompt_tokens is not None:
            self._recorder.output_tokens += slot.output_tokens
            if finished and self._learns:
                self._outputs.learn(slot.output_tokens // slot.records)
            if slot.charged:
                self._queue.settle(slot, slot.charged, slot.prompt_tokens + slot.output_tokens)

    def _outgrown(self, slot: Slot) -> None:
        if slot.prompt_tokens is None or slot.max_tokens is None:
            return
        expected = self._expected(slot.max_tokens, slot.records, slot.output_tokens)
        cost = slot.prompt_tokens + max(expected, slot.output_tokens)
        self._running_cost += cost - slot.cost
        if (background := self._background) is not None:
            background.grow(slot.priority >= background.priority, cost - slot.cost)
        slot.cost = cost
        self._recorder.fill(self._running_cost / self._capacity, self._clock())

    def _expected(self, max_tokens: int, records: int, so_far: int = 0) -> int:
        """Return the tokens to reserve for the output of some records together."""
        if records == 1:
            return self._outputs.expect(max_tokens, so_far)
        return min(max_tokens, records * self._outputs.expect(-(-max_tokens // records), so_far // records))

    def _first_token(self, slot: Slot) -> None:
        background = self._background
        if background is None or slot.first_at:
            return
        slot.first_at = self._clock()
        if slot.priority < background.priority:
            background.window.first_token(slot.first_at - slot.submitted_at, background.running)

    # The end of records, and of the batcher

    def _tell(self, entry: Slot, error: BatcherError) -> None:
        super()._tell(entry, error)
        if entry.turn is not None and not entry.turn.done():
            entry.turn.set_result(None)

    def _idle(self) -> bool:
        return not self._running

    def _waits_for(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._tasks or any(slot.owner is task for slot in self._running)

    def _abort(self) -> list[asyncio.Task[Any]]:
        for task, slot in self._tasks.items():
            if slot.running:
                task.cancel()
        return list(self._tasks)

    def _abandon(self) -> None:
        for slot in list(self._running):
            self._finish(slot, Aborted("the event loop was closed while the record ran"))
        self._tasks.clear()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never gets to leave its slot by itself.
        self._leave(self._tasks.pop(task), asyncio.CancelledError())
