"""ContinuousBatcher: a window of in-flight cost in front of an engine that batches for itself."""

import asyncio
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import EllipsisType
from typing import Any, Literal, TypedDict, TypeVar, Unpack

from batcher import checks
from batcher.admission import STOPPING, UNKNOWN_WAIT_S, Batcher
from batcher.costs import whole_cost
from batcher.errors import Aborted, Expired
from batcher.goals import BACKGROUND, Background, Goals
from batcher.stats import ContinuousStats, Load
from batcher.window import Slot, Window

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")

HOPELESS = 2.0  # a wait that is estimated as so many times what a deadline leaves is not begun

Policy = Literal["guaranteed_no_evict", "max_utilization"]
OversizePolicy = Literal["reject", "alone"]


class SlotOptions(TypedDict, total=False):
    """The arguments of `ContinuousBatcher.slot` beside `cost` and `wait`."""

    priority: int
    tenant: str
    deadline: float | None
    timeout: float | None
    prompt_tokens: int | None
    max_tokens: int | None
    records: int
    arrived_at: float | None


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
        places: Records in one step of the engine, which queues what is beyond. So many run, and as many
            more, waiting in the engine, as end until others could come: so none of the places stays empty.
            None: the engine has no such limit.
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
        clock: Returns the time in seconds, which never goes back; deadlines are on it.

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
        checks.whole("places", places, 1, optional=True)
        checks.whole("background", background, -checks.PRIORITIES, checks.PRIORITIES)
        checks.one_of("policy", policy, ("guaranteed_no_evict", "max_utilization"))
        checks.one_of("oversize", oversize, ("reject", "alone"))
        self._background = Background(goals, background, clock)
        apart = None if goals is None else background
        super().__init__(max_queue_size, max_queue_cost, priority_aging_s, tenant_weights, clock, apart)
        self._learns = policy == "max_utilization"
        self._window = Window(
            places, self._learns, oversize == "alone", self._background, self._recorder, clock
        )
        self._window.enter = self._enter_slot
        self._window.leave = self._leave
        self._window.withdraw = self._withdraw
        self._tasks: dict[asyncio.Task[Any], Slot] = {}
        self.set_capacity(capacity, max_running=max_running)

    @property
    def capacity(self) -> int:
        """Cost that may run at once."""
        return self._window.capacity

    @property
    def stats(self) -> ContinuousStats:
        """A snapshot, true at this moment."""
        now = self._clock()
        window = self._window
        return ContinuousStats(
            **self._common_stats(now),
            running=window.records,
            running_cost=window.cost,
            capacity=window.capacity,
            max_running=None if window.regular == sys.maxsize else window.regular,
            occupancy=self._recorder.occupancy(now),
            outside_cost=self._queue.outside_cost,
            output_tokens=self._recorder.output_tokens,
            **self._recorder.first_tokens(),  # type: ignore[arg-type]
            **self._background.stats(),  # type: ignore[arg-type]
        )

    async def start(self) -> None:
        await super().start()
        self._window.loop = self.loop

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        await super().stop(False if self._window.paused else drain, timeout)

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
        arrived_at: float | None = None,
    ) -> Slot:
        """Return the place of one record, to be entered with `async with`.

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
            arrived_at: Time on `clock` from which its TTFT counts for goals, as its request was under way
                before; None: its submission.

        Raises:
            ValueError: Neither or both ways of giving a cost are used, or a number is out of range.
            TypeError: The tenant is not a string.
            Expired: The deadline has passed. Entering raises it for a deadline that can't be kept, too.
            QueueFull: On entering: the queue is full, and `wait` is False.
            Oversize: On entering: the record can never run.
            RuntimeError: On entering: the batcher isn't running (`Closed`), or runs on another event loop.
        """
        if cost is None and prompt_tokens is not None and max_tokens is not None:
            prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
            max_tokens = whole_cost("max_tokens", max_tokens)
            checks.whole("records", records, 1)
            cost = prompt_tokens + self._window.reserved(max_tokens, records)
        elif cost is None or prompt_tokens is not None or max_tokens is not None:
            raise ValueError("give either cost, or both prompt_tokens and max_tokens")
        slot = Slot(self._window, cost, priority, tenant, deadline, records)
        if timeout is not None:
            slot.deadline = self._deadline(deadline, timeout, self._clock(), records)
        slot.wait, slot.prompt_tokens, slot.max_tokens = wait, prompt_tokens, max_tokens
        if arrived_at is not None:
            checks.instant("arrived_at", arrived_at)
            slot.arrived_at = arrived_at
        return slot

    async def submit(
        self,
        process_fn: Callable[[RecordT], Awaitable[ResultT]],
        record: RecordT,
        cost: int | None = None,
        *,
        wait: bool = True,
        **options: Unpack[SlotOptions],
    ) -> asyncio.Task[ResultT]:
        """Queue one record and return the task that will run `process_fn(record)` in a slot.

        Returns once the record is admitted to the queue. Cancelling the task takes the record out of the
        queue, or cancels `process_fn` if it runs. The other arguments and the errors are those of `slot`
        and of entering it, but that it waits for space unless `wait` is False.

        Raises:
            TypeError: `process_fn` is not a function.
        """
        checks.function("process_fn", process_fn)
        slot = self.slot(cost, wait=wait, **options)
        self._enter_slot(slot)
        if not slot.admitted:
            try:
                await self._wait_for_space(slot)
            except BaseException as error:
                self._leave(slot, error)
                raise
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
        if isinstance(max_running, EllipsisType):
            most = None
        else:
            checks.whole("max_running", max_running, 1, optional=True)
            most = sys.maxsize if max_running is None else max_running
        self._window.resize(capacity, most)
        for slot, error in [(slot, self._window.oversize(slot)) for slot in self._queue]:
            if error is not None:
                self._queue.remove(slot)
                self._end(slot, error)
        if self._loop is not None:
            self._decide()

    def set_queue_size(self, max_queue_size: int) -> None:
        """Change the records that may wait, also while records wait; those beyond a smaller number stay.

        Raises:
            ValueError: The number is out of range.
        """
        checks.whole("max_queue_size", max_queue_size, 1)
        self._queue.set_max_size(max_queue_size)
        if self._loop is not None:
            self._decide()

    def set_goals(self, goals: Goals) -> None:
        """Change the goals of the foreground, also while records run.

        Raises:
            ValueError: The batcher was made without goals, so its tiers share the window.
        """
        if self._background.goals is None:
            raise ValueError("the batcher was made without goals")
        self._background.goals = goals

    def pause(self, seconds: float = 0.0) -> None:
        """Start nothing until `resume`. What runs goes on, and the queue takes records as before.

        A `stop` refuses what waits then, as with `drain=False`; one that is under way does so at once.

        Args:
            seconds: How long it will last, for `estimate_wait`; a further call changes it.
        """
        checks.seconds("seconds", seconds)
        self._window.pause(seconds)
        if self._state == STOPPING:
            self._refuse_all()
            self._decide()

    def resume(self) -> None:
        """Start records again."""
        self._window.resume()
        if self._loop is not None:
            self._decide()

    @property
    def load(self) -> Load:
        """What runs and waits at this moment."""
        queue = self._queue
        tier = queue.first_priority() or 0
        return Load(self._window.records, queue.total, queue.total_cost, tier, queue.next_deadline())

    def step(self, seconds: float) -> None:
        """Take in how long a step of the engine took, for goals to be held; without goals it does nothing.

        Raises:
            ValueError: It is not a time.
        """
        checks.seconds("seconds", seconds)
        if self._background.step(seconds) and self._queue.total:
            self._decide()

    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        before, ahead = self._queue.ahead(priority, tenant)
        wait = self._window.wait(before, ahead, cost, priority, records)
        return self._window.pause_s + (UNKNOWN_WAIT_S if wait is None else wait)

    # Coming

    def _enter_slot(self, slot: Slot) -> None:
        """Start a slot if it may start; otherwise it waits in the queue, or for space in it.

        Raises:
            BatcherError: It is refused.
        """
        if slot.used:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        self._check_open(slot.records)
        slot.used = True
        if (oversize := self._window.oversize(slot)) is not None:
            self._recorder.total_rejected += slot.records
            raise oversize
        now = slot.submitted_at = self._clock()
        if slot.deadline is not None:
            self._check_hope(slot, slot.deadline, now)
        window = self._window
        if not self._queue.total and window.fits(slot) and not window.held_back(slot):
            self._queue.pass_by(slot)
            window.begin(slot)
        else:
            asyncio.Future.__init__(slot, loop=self._loop)
            # One that doesn't fit changes nothing: if it is the first now, what follows waits behind it.
            if not self._queue.put(slot) or window.fits(slot):
                self._enter(slot, slot.wait)
            elif slot.deadline is not None:
                self._set_alarm()

    def _check_hope(self, slot: Slot, deadline: float, now: float) -> None:
        """Raise `Expired` for a slot that will hardly start in time."""
        self._deadline(deadline, None, now, slot.records)
        wait = self.estimate_wait(slot.cost, slot.priority, slot.tenant, records=slot.records)
        if self._window.rate.known and wait > HOPELESS * (deadline - now):
            self._recorder.total_rejected += slot.records
            raise Expired(f"the record could not start for about {wait:.1f} s, after its deadline")

    async def _process(
        self, process_fn: Callable[[RecordT], Awaitable[ResultT]], record: RecordT, slot: Slot
    ) -> ResultT:
        await slot.started()
        try:
            result = await process_fn(record)
        except BaseException as error:
            self._leave(slot, error)
            raise
        self._leave(slot, None)
        return result

    # Starting

    def _start_ready(self) -> None:
        """Start the slots whose turn it is, as long as they fit."""
        queue, window = self._queue, self._window
        while queue.total and (slot := self._next()) is not None and window.fits(slot):
            queue.pick(slot)
            slot.charged = slot.cost
            window.begin(slot)
            slot.set_result(None)

    def _next(self) -> Slot | None:
        """Return the slot whose turn it is; where the background is held back, that of the others."""
        slot = self._queue.head()
        if slot is None or not self._window.held_back(slot):
            return slot
        return self._queue.head(before=self._background.priority)

    def _leave(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out, wherever it is; one that has left already is left alone."""
        if slot.running:
            self._window.end(slot, error)
            if slot.output_tokens and slot.prompt_tokens is not None and slot.charged:
                self._queue.settle(slot, slot.charged, slot.prompt_tokens + slot.output_tokens)
        elif self._queue.remove(slot):
            if slot.admitted:
                self._recorder.total_cancelled += slot.records
            if not isinstance(error, GeneratorExit):
                # It was released while its caller waits for it.
                slot.fail(Aborted("the slot was released before it started"))
                self._tell(slot)
        else:
            return
        if self._queue.total or self._ended is not None:
            self._decide()

    # The end

    def _idle(self) -> bool:
        return not self._window.running

    def _waits_for(self, task: asyncio.Task[Any] | None) -> bool:
        return task in self._tasks or any(slot.owner is task for slot in self._window.running)

    def _abort(self) -> list[asyncio.Task[Any]]:
        for task, slot in self._tasks.items():
            if slot.running:
                task.cancel()
        return list(self._tasks)

    def _abandon(self) -> None:
        for slot in list(self._window.running):
            self._window.end(slot, Aborted("the event loop was closed while the record ran"))
        self._tasks.clear()

    def _forget(self, task: asyncio.Task[Any]) -> None:
        # A task that is cancelled before its first step never gets to leave its slot by itself.
        self._leave(self._tasks.pop(task), asyncio.CancelledError())
