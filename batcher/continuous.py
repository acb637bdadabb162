"""ContinuousBatcher: a window of in-flight cost in front of an engine that batches for itself."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import EllipsisType
from typing import Any, Literal, TypeVar

from batcher import checks
from batcher.admission import UNKNOWN_WAIT_S, Intake, State
from batcher.background import BACKGROUND, Background
from batcher.costs import OutputEstimator, whole_cost
from batcher.errors import BatcherError, Expired, Oversize
from batcher.lead import Lead
from batcher.lifecycle import Lifecycle
from batcher.observations import Observation, Outcome
from batcher.queue import RequestQueue
from batcher.rates import ServiceRate
from batcher.slo import Goals
from batcher.slot import Slot
from batcher.stats import ContinuousStats, WindowRecorder

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

HOPELESS = 2.0
"""A wait that is estimated as so many times what a deadline leaves is not begun."""

Policy = Literal["guaranteed_no_evict", "max_utilization"]
OversizePolicy = Literal["reject", "alone"]


class ContinuousBatcher(Lifecycle):
    """Admits records to an engine that batches continuously, by what they cost.

    A record starts when its cost fits into what is left of `capacity`, in the order of `RequestQueue`,
    and leaves when its block ends. A batch is never frozen::

        async with ContinuousBatcher(capacity=40_000) as batcher:
            async with batcher.slot(len(prompt) + max_tokens, tenant=user):
                ...

    Args:
        capacity: Cost that may run at once, in tokens of KV cache for an LLM.
        max_running: Records that may run at once; None: no bound but `places`.
        places: Records in one step of the engine, which queues what is beyond. So many run, and a few
            more that wait in the engine for the places of those that end; see `Lead`. None: the engine
            has no such limit.
        max_queue_size: Records that may wait.
        max_queue_cost: Cost that may wait; None: no bound.
        policy: What a record reserves when it names `prompt_tokens` and `max_tokens`.
            "guaranteed_no_evict": both, so what runs can always finish. "max_utilization": the prompt
            and the output that finished requests lead to expect, corrected by `Slot.report`.
        oversize: What becomes of a record that costs more than the capacity: "reject" refuses it,
            "alone" lets it run with nothing beside it.
        priority_aging_s: Seconds after which a class that waits passes the one a level above, for one
            record; None: never.
        tenant_weights: Share of a tenant in relation to the others; 1.0 where not given.
        goals: What the foreground is to get, that is the classes before `background`. The others then
            run as many as that allows, and leave room for it; see `Background`. It takes `step` and
            `Slot.first_token` to know. None: all classes share the window.
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
        checks.one_of("policy", policy, ("guaranteed_no_evict", "max_utilization"))
        checks.one_of("oversize", oversize, ("reject", "alone"))
        self._clock = clock
        self._learns = policy == "max_utilization"
        self._alone = oversize == "alone"
        self._outputs = OutputEstimator()
        self._background = None if goals is None else Background(goals, background, clock)
        self._queue: RequestQueue[Slot] = RequestQueue(
            clock=clock,
            max_size=max_queue_size,
            max_cost=max_queue_cost,
            priority_aging_s=priority_aging_s,
            tenant_weights=tenant_weights,
            background=None if goals is None else background,
        )
        self._recorder: WindowRecorder = WindowRecorder()
        self._intake = Intake(self, self._queue, self._recorder, clock)
        self._rate = ServiceRate()
        self._background_rate = ServiceRate()
        self._lead = None if places is None else Lead(places)
        self._capacity = self._max_running = 1
        self._running = 0
        self._running_cost = 0
        self._tasks: dict[asyncio.Task[Any], Slot] = {}
        self.set_capacity(capacity, max_running=max_running)

    @property
    def stats(self) -> ContinuousStats:
        """A snapshot, true at this moment."""
        now = self._clock()
        background = self._background
        return ContinuousStats(
            **self._recorder.common(now),  # type: ignore[arg-type]
            queue_depth=self._queue.size,
            queue_cost=self._queue.cost,
            queue_classes=self._queue.classes(),
            running=self._running,
            running_cost=self._running_cost,
            capacity=self._capacity,
            max_running=None if (regular := self._regular()) == sys.maxsize else regular,
            occupancy=self._recorder.occupancy(now),
            outside=self._intake.outside,
            outside_cost=self._intake.outside_cost,
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
        returning: bool = False,
    ) -> Slot:
        """Return the place of one record, to be entered with `async with`.

        Entering raises `QueueFull`, `Oversize`, `Expired` or `Closed`.

        Args:
            cost: What the record holds while it runs; or else `prompt_tokens` and `max_tokens`.
            priority: Lower goes first.
            tenant: Whose record it is.
            deadline: Time on `clock` by which it must have started.
            wait: Wait for room when the queue is full, behind those who do so already; False: `QueueFull`.
            prompt_tokens: Tokens of the prompt.
            max_tokens: The most tokens that may be produced.
            returning: It was refused before, and comes back when it was told to.

        Raises:
            ValueError: Neither or both ways of giving a cost are used, or a number is negative.
        """
        if prompt_tokens is None or max_tokens is None:
            if cost is None or prompt_tokens is not None or max_tokens is not None:
                raise ValueError("give either cost, or both prompt_tokens and max_tokens")
            if type(cost) is not int or cost < 0:
                cost = whole_cost("cost", cost)
        elif cost is not None:
            raise ValueError("give either cost, or both prompt_tokens and max_tokens")
        else:
            prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
            max_tokens = whole_cost("max_tokens", max_tokens)
            cost = prompt_tokens + (self._outputs.expect(max_tokens) if self._learns else max_tokens)
        return Slot(self, cost, priority, tenant, deadline, wait, prompt_tokens, max_tokens, returning)

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
    ) -> asyncio.Task[ResultT]:
        """Queue one record and return the task that will run `process_fn(record)` in a slot.

        Returns once the record has its place in the queue. Cancelling the task takes the record out of
        the queue, or cancels `process_fn` if it runs.

        Args:
            process_fn: Processes one record.
            record: What it is given.
            cost: As for `slot`, like everything that follows.

        Raises:
            QueueFull: The queue is full and `wait` is False.
            Oversize: The record can never run.
            Expired: The deadline passed before there was room.
            Closed: The batcher isn't running.
        """
        slot = self.slot(
            cost, priority, tenant, deadline, wait, prompt_tokens=prompt_tokens, max_tokens=max_tokens
        )
        if not self._enter(slot):
            await self._find_room(slot)
        task = asyncio.get_running_loop().create_task(self._process(process_fn, record, slot))
        self._tasks[task] = slot
        task.add_done_callback(self._forget)
        return task

    def set_capacity(self, capacity: int, max_running: int | EllipsisType | None = ...) -> None:
        """Change what may run at once, also while records run.

        When it shrinks, what runs goes on; with `oversize="reject"`, what waits and no longer fits fails
        with `Oversize`.

        Args:
            capacity: Cost that may run at once.
            max_running: Records that may run at once; None: no bound but the engine's places; left out: as
                many as before.

        Raises:
            ValueError: A number is below 1.
        """
        checks.whole("capacity", capacity, 1)
        if max_running is None:
            self._max_running = sys.maxsize
        elif not isinstance(max_running, EllipsisType):
            checks.whole("max_running", max_running, 1)
            self._max_running = max_running
        self._capacity = capacity
        self._recorder.fill(self._running_cost / capacity, self._clock())
        if not self._alone:
            for entry in [entry for entry in self._queue if entry.cost > capacity]:
                self._queue.remove(entry)
                self._recorder.failed += 1
                self._fail(entry, Oversize(entry.cost, capacity))
        self._advance()

    def weigh(self, tenant: str, weight: float) -> None:
        """Give a tenant another weight than `tenant_weights` does, from now on.

        Raises:
            ValueError: The weight is no finite number above 0.
        """
        self._queue.weigh(tenant, weight)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the tenants' shares, also of those that wait.

        Args:
            weights: Share of a tenant in relation to the others; 1.0 where not given.

        Raises:
            ValueError: A weight is not a finite number above 0.
        """
        self._queue.set_tenant_weights(weights)

    def step(self, seconds: float) -> None:
        """Take in how long a step of the engine took, for goals to be held; without goals it does nothing."""
        background = self._background
        if background is not None and background.step(seconds) and self._queue.size:
            self._advance()

    def estimate_wait(self, cost: int, priority: int = 0, tenant: str | None = None) -> float:
        """Return the seconds that a record submitted now would wait for its start.

        What has to be served first is what waits before it, less what is free; see `ServiceRate`.

        Args:
            cost: What the record costs.
            priority: Its class; what waits in lower classes doesn't count.
            tenant: Whose it is; None: it goes behind its whole class.
        """
        free = self._capacity - self._running_cost
        places = self._most() - self._running
        running, running_cost, rate = self._running, self._running_cost, self._rate
        background = self._background
        if background is not None and priority >= background.priority:
            most, most_cost = background.places(self._capacity, self._regular())
            running, running_cost, rate = background.running, background.cost, self._background_rate
            places, free = min(places, most - running), min(free, most_cost - running_cost)
        records, ahead = self._queue.ahead(priority, tenant)
        outside, outside_cost = self._intake.ahead(priority, tenant)
        if not records and not outside and cost <= free and places > 0:
            return 0.0
        wait = rate.time_to_serve(
            records + outside + 1 - max(places, 0),
            ahead + outside_cost + cost - max(free, 0),
            running,
            running_cost,
        )
        return UNKNOWN_WAIT_S if wait is None else wait

    def _regular(self) -> int:
        """Return how many records may run, without those that wait in the engine."""
        lead = self._lead
        return self._max_running if lead is None else min(self._max_running, lead.places)

    def _most(self) -> int:
        """Return how many records may run, with those that wait in the engine."""
        lead = self._lead
        return self._max_running if lead is None else min(self._max_running, lead.places + lead.records)

    def _fits(self, cost: int) -> bool:
        if self._running >= self._most():
            return False
        return self._running_cost + cost <= self._capacity or not self._running

    def _enter(self, slot: Slot) -> bool:
        """Start a slot at once if nothing is before it and it fits."""
        if slot._used:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        intake = self._intake
        if intake.state is not State.RUNNING:
            raise intake.turn_away()
        slot._used = True
        if slot.cost > self._capacity and not self._alone:
            self._recorder.rejected += 1
            raise Oversize(slot.cost, self._capacity)
        if slot.deadline is not None:
            intake.check_deadline(slot)
        now = slot.submitted_at = self._clock()
        if self._behind(slot) or not self._fits(slot.cost):
            return False
        self._recorder.submitted += 1
        self._begin(slot, now)
        return True

    def _behind(self, slot: Slot) -> bool:
        """Return whether others go before a slot that comes now, or it is held back for them."""
        if not self._queue.size and not self._intake.outside:
            return self._held_back(slot)
        background = self._background
        if background is None or slot.priority >= background.priority:
            return True
        before = background.priority - 1
        return bool(self._queue.ahead(before)[0] or self._intake.ahead(before)[0])

    def _held_back(self, slot: Slot) -> bool:
        background = self._background
        if background is None or slot.priority < background.priority:
            return False
        return not background.admits(slot.cost, self._capacity, self._regular())

    async def _find_room(self, slot: Slot) -> None:
        """Put a slot into the queue, waiting for room if it may."""
        slot._granted = self._intake.loop.create_future()
        if slot._wait and self._intake.full(slot):
            await self._intake.enter_when_room(slot)
        else:
            if slot.deadline is not None:
                self._check_hope(slot, slot.deadline)
            self._intake.enter(slot)
            self._advance()

    def _check_hope(self, slot: Slot, deadline: float) -> None:
        """Refuse a slot that would only wait for its deadline."""
        if not self._rate.known:
            return
        wait = self.estimate_wait(slot.cost, slot.priority, slot.tenant)
        if wait > HOPELESS * (deadline - slot.submitted_at):
            self._recorder.rejected += 1
            raise Expired(f"the record could not start for about {wait:.1f} s, after its deadline")

    async def _wait_for_turn(self, slot: Slot) -> None:
        """Wait until a slot that has its place in the queue starts."""
        if slot._running:
            return
        assert slot._granted is not None
        try:
            await slot._granted
        except asyncio.CancelledError as error:
            self._leave(slot, error)
            raise
        if slot._refusal is not None:
            raise slot._refusal

    async def _process(
        self, process_fn: Callable[[RecordT], Awaitable[ResultT]], record: RecordT, slot: Slot
    ) -> ResultT:
        await self._wait_for_turn(slot)
        try:
            result = await process_fn(record)
        except BaseException as error:
            self._leave(slot, error)
            raise
        self._leave(slot, None)
        return result

    def _begin(self, slot: Slot, now: float) -> None:
        slot.started_at = now
        slot.waited_s = now - slot.submitted_at
        slot._running = True
        if not self._running:
            self._recorder.switch(True, now)
        self._running += 1
        self._running_cost += slot.cost
        self._recorder.fill(self._running_cost / self._capacity, now)
        if (background := self._background) is not None:
            prompt = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens
            background.begin(slot.priority >= background.priority, slot.cost, prompt)

    def _leave(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out, wherever it is; one that has left already is left alone."""
        recorder = self._recorder
        if not slot._running:
            if self._queue.remove(slot):
                recorder.cancelled += 1
                self._advance()
            return
        slot._running = False
        now = self._clock()
        self._running -= 1
        self._running_cost -= slot.cost
        recorder.fill(self._running_cost / self._capacity, now)
        run = now - slot.started_at
        if not self._running:
            recorder.switch(False, now)
        self._record(slot, run, error)
        self._learn(slot, now, run, finished=error is None)
        self._advance()

    def _record(self, slot: Slot, run: float, error: BaseException | None) -> None:
        """Count a slot that ran, and how it ended."""
        recorder = self._recorder
        recorder.ran += 1
        recorder.run_s += run
        recorder.waits.append(slot.waited_s)
        recorder.runs.append(run)
        outcome: Outcome = "failed"
        if error is None:
            outcome = "completed"
            recorder.completed += 1
            recorder.completed_cost += slot.cost
            recorder.latency_s += slot.waited_s + run
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = "cancelled"
            recorder.cancelled += 1
        else:
            recorder.failed += 1
        if recorder.observations is not None:
            used = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens + slot.output_tokens
            recorder.observations.records.append(
                Observation(slot.tenant, slot.priority, used, slot.waited_s, run, outcome)
            )

    def _learn(self, slot: Slot, now: float, run: float, *, finished: bool) -> None:
        """Take from a slot that ran what helps to judge those that come."""
        if finished and self._lead is not None:
            self._lead.learn(slot.output_tokens)
        self._rate.learn(slot.cost, run)
        if (background := self._background) is not None:
            behind = slot.priority >= background.priority
            background.end(behind, slot.cost, run)
            if behind:
                self._background_rate.learn(slot.cost, run)
            elif slot.first_at and slot.output_tokens > 1:
                background.window.answered((now - slot.first_at) / (slot.output_tokens - 1))
        if slot.output_tokens and slot.prompt_tokens is not None:
            self._recorder.output_tokens += slot.output_tokens
            if finished and self._learns:
                self._outputs.learn(slot.output_tokens)
            if slot._charged:
                self._queue.settle(slot, slot._charged, slot.prompt_tokens + slot.output_tokens)

    def _outgrown(self, slot: Slot) -> None:
        assert slot.prompt_tokens is not None
        assert slot.max_tokens is not None
        expected = self._outputs.expect(slot.max_tokens, slot.output_tokens)
        cost = slot.prompt_tokens + max(expected, slot.output_tokens)
        self._running_cost += cost - slot.cost
        if (background := self._background) is not None:
            background.grow(slot.priority >= background.priority, cost - slot.cost)
        slot.cost = cost
        self._recorder.fill(self._running_cost / self._capacity, self._clock())

    def _first_token(self, slot: Slot) -> None:
        background = self._background
        if background is None or slot.first_at:
            return
        slot.first_at = self._clock()
        if slot.priority < background.priority:
            background.window.first_token(slot.first_at - slot.submitted_at, background.running)

    def _advance(self) -> None:
        """Start what can start, and let others in where that made room."""
        intake = self._intake
        queue = self._queue
        if intake.outside:
            intake.admit()
        while (slot := self._next()) is not None:
            assert slot._granted is not None
            if slot._granted.done():
                # Its task was cancelled and has not run since.
                queue.remove(slot)
                self._recorder.cancelled += 1
            elif self._fits(slot.cost):
                queue.pick(slot)
                slot._charged = slot.cost
                self._begin(slot, self._clock())
                slot._granted.set_result(None)
            else:
                break
            if intake.outside:
                intake.admit()
        intake.expire()
        intake.check_emptied()

    def _next(self) -> Slot | None:
        """Return the slot whose turn it is; where the background is held back, that of the others."""
        slot = self._queue.head()
        if slot is None or self._background is None or not self._held_back(slot):
            return slot
        return self._queue.head(before=self._background.priority)

    def _fail(self, slot: Slot, error: BatcherError) -> None:
        slot._refusal = error
        if slot._granted is not None and not slot._granted.done():
            slot._granted.set_result(None)

    def _abandon(self, slot: Slot) -> None:
        self._leave(slot, asyncio.CancelledError())

    def _idle(self) -> bool:
        return not self._running

    def _drop_formed(self, error: BatcherError) -> None:
        """Nothing is ever between the queue and its start."""

    def _abort(self) -> list[asyncio.Task[Any]]:
        for task, slot in self._tasks.items():
            if slot._running:
                task.cancel()
        return list(self._tasks)

    def _forget(self, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never gets to leave its slot by itself.
        self._abandon(self._tasks.pop(task))
