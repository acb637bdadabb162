"""ContinuousBatcher: a window of in-flight cost in front of an engine that batches for itself."""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Mapping
from types import EllipsisType
from typing import Any, Literal, Protocol, Self, TypedDict, Unpack

from batcher import checks
from batcher.admission import RUNNING, STOPPING, UNKNOWN_WAIT_S, Batcher
from batcher.costs import RecordT, whole_cost
from batcher.entries import Entry, ResultT
from batcher.errors import Aborted, Expired, Oversize
from batcher.outputs import Answer, Outputs
from batcher.service_rate import Correction
from batcher.stats import RECENT, ContinuousStats, Load, Observation, Outcome
from batcher.window import NOTHING, Claim, Part, Window

STEPS = 2  # from the end of a record to the first of one let in then: one tells the end, the next is planned
FIRST_OUTPUT = 64.0  # tokens that a record is expected to produce before one has ended
OUTPUT_MEMORY = 1 - 1 / 64  # weight that a record keeps in the mean output when the next one ends
ASK_S = 0.25  # seconds until slots that run are asked again for their tokens
HOPELESS = 2.0  # a wait that is estimated as so many times what a deadline leaves is not begun


class Lanes(Protocol):
    """Owner of what records need beside cost, such as the places of adapters on a device.

    A `ContinuousBatcher` calls it when it decides, never from another thread; no call may wait. A need is a
    name, as given to `ContinuousBatcher.slot`. A record starts only with all its needs. If a need is refused,
    the record is passed by: it keeps its place in the queue, and records behind it may start. A refused need
    is not asked for again until `give` or `unwanted` returns True, or `ContinuousBatcher.reopen` is called.
    """

    def take(self, need: str) -> bool:
        """Take the need for one record now; False: not now. A refused call is a wish for the need.

        A wish ends with the next `take` of the need that returns True, or with `unwanted`. A need is given
        back at once if another need of the same record is refused; the result of that `give` doesn't count.
        """
        ...

    def give(self, need: str) -> bool:
        """Give the need of one record back; return whether needs that were refused may succeed now."""
        ...

    def unwanted(self, need: str) -> bool:
        """End a wish: no record waits for the need any more. The result is as for `give`."""
        ...


class Slot(Entry[None]):
    """A place in the window, of one record or of several; `async with` waits for it and gives it back."""

    # As given to `ContinuousBatcher.slot`; `cost` is what it holds of the capacity now.
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    needs: tuple[str, ...] = ()
    held: tuple[str, ...] = ()  # the needs that it has taken, and not given back
    running: bool = False  # whether it is in the window
    promoted: bool = False  # a background slot that waited too long and was started as foreground
    started_at: float = math.inf  # time of its start; infinite before
    waited_s: float = 0.0  # seconds from submission to start
    first_at: float = 0.0  # time of its first token, 0 before
    output_tokens: int = 0  # tokens reported so far
    charged: int = 0  # what its tenant was charged for it
    corrected: bool = False
    owner: asyncio.Task[Any] | None = None  # the task that holds it
    _batcher: "ContinuousBatcher"
    _part: Part  # the part of the window in which it runs, or has run
    _claim: Claim  # what it claims there; `cost` is its mean
    _answer: Answer | None = None  # if its output is estimated
    _outgrown: float = math.inf  # output tokens from which on it claims something else
    _produced: Callable[[], int] | None = None  # see `follow`

    async def enter(self) -> Self:
        """Return once the slot runs or is in the queue; it waits outside while the queue is full.

        `async with` waits for its start then. The errors are as in `ContinuousBatcher.slot`.
        """
        if self.entered:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        batcher = self._batcher
        batcher._enter_slot(self, True)
        if not self.admitted:
            try:
                await batcher._wait_for_space(self)
            except BaseException as error:
                batcher._leave(self, error)
                raise
        return self

    def enter_nowait(self) -> Self:
        """Enter at once: the slot runs or is in the queue when this returns.

        Raises:
            QueueFull: There is no space; says when to try again. The other errors are as in `enter`.
        """
        if self.entered:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        self._batcher._enter_slot(self, False)
        return self

    async def started(self) -> Self:
        """Return once the slot runs, as `async with` does; `release` gives it back. Again returns at once."""
        return self if self.running and self.owner is not None else await self.__aenter__()

    @property
    def entered(self) -> bool:
        """Whether it was let in, or waits for that."""
        return self.admitted or self.waiting

    async def __aenter__(self) -> Self:
        batcher = self._batcher
        if not self.admitted and self._next is None:
            batcher._enter_slot(self, True)
        elif self.owner is not None:
            raise RuntimeError("a slot can be entered once; call slot() for another")
        elif self.started_at < math.inf and not self.running:
            raise Aborted("the slot was given back; it can be entered once, call slot() for another")
        # To look for the event loop takes Python 3.11 a system call.
        self.owner = asyncio.current_task(batcher._loop)
        if not self.running:
            try:
                await self
            except BaseException as error:
                # It may have started just before its caller was cancelled.
                batcher._leave(self, error)
                raise
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._batcher._leave(self, error)

    def release(self, error: BaseException | None = None) -> None:
        """Give the place back, and say how it ended; again does no harm.

        A caller that waits to enter gets `Aborted`.

        Args:
            error: None: it completed; a CancelledError or GeneratorExit: it was cancelled; other: it failed.
        """
        waits = self.waiting
        self._batcher._leave(self, error)
        if waits and not self._batcher.loop.is_closed():
            self.fail(Aborted("the slot was released before it started"))
            self.exception()  # Python reports errors that are not looked at; nobody may wait for this one

    def give(self, need: str) -> None:
        """Give a need back before the slot leaves; a second call, or a late call, does no harm.

        Raises:
            ValueError: It has no such need.
        """
        if need not in self.needs:
            raise ValueError(f"need must be one of {self.needs!r}, not {need!r}")
        if need in self.held:
            self.held = tuple(other for other in self.held if other != need)
            self._batcher._give((need,))
            self._batcher._decide()

    def correct(self, prompt_tokens: int, max_tokens: int) -> None:
        """Replace the bound with which it was admitted by its tokens, which are known now.

        Its cost may shrink, so that other records start at once, or grow, even beyond the capacity. Its
        tenant is charged for the new cost at once. Does nothing once it has left.

        Args:
            prompt_tokens, max_tokens: As for `ContinuousBatcher.slot`, of all its records together.

        Raises:
            RuntimeError: It has not started yet.
        """
        prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
        max_tokens = whole_cost("max_tokens", max_tokens)
        if self.started_at == math.inf:
            raise RuntimeError("a slot can be corrected once it has started")
        if not self.running:
            return
        batcher, queue, before = self._batcher, self._batcher._queue, self.cost
        self.prompt_tokens, self.max_tokens = prompt_tokens, max_tokens
        batcher._resize(self)
        cost, begins = self.cost, not self.corrected
        if begins:
            self.corrected = True
            self._part.starting -= 1
            batcher._correction.learn(self.charged or before, cost)
        if self.charged:
            queue.settle(self, self.charged, cost or 1)
            self.charged = cost or 1
        if (cost < before or begins) and queue.total:
            batcher._decide()

    def first_token(self) -> None:
        """Tell that the first token is there, for the statistics."""
        batcher = self._batcher
        if self.running and not self.first_at:
            self.first_at = batcher._clock()
            batcher._recorder.ttfts_s.append(self.first_at - self.submitted_at)

    def report(self, output_tokens: int) -> None:
        """Tell how many tokens the slot's records have produced in all, not since the last report.

        With `max_utilization`, the reservation of a background slot follows. A slot that outgrows the most
        that it may produce reserves more, even beyond the capacity: nothing new starts until there is space
        again.
        """
        checks.whole("output_tokens", output_tokens, 0)
        self.output_tokens = output_tokens
        if output_tokens >= self._outgrown and self.running:
            self._batcher._resize(self)

    def follow(self, produced: Callable[[], int]) -> None:
        """Have the batcher ask how many tokens the records have produced, where nobody reports them.

        With `max_utilization` it asks a few times per second, while records wait.
        """
        self._produced = produced


class SlotOptions(TypedDict, total=False):
    """The arguments of `ContinuousBatcher.slot` beside `cost`."""

    priority: int
    tenant: str
    deadline: float | None
    timeout: float | None
    prompt_tokens: int | None
    max_tokens: int | None
    records: int
    needs: tuple[str, ...]


class ContinuousBatcher(Batcher[Slot]):
    """Admits records to an engine that batches continuously, by their cost.

    A record starts when its cost fits into what is left of `capacity`, in the order of `RequestQueue`,
    and leaves when its block ends. A batch is never frozen::

        async with ContinuousBatcher(capacity=40_000) as batcher:
            async with batcher.slot(len(prompt) + max_tokens, tenant=user):
                ...

    Args:
        capacity: Cost that may run at once, in tokens of KV cache for an LLM.
        max_running: Records that may run at once, also of one slot; None: no bound but `places`.
        places: Records in one step of the engine, which queues further records. This many records run, and
            the engine also has the records that take the places of records ending soon: so no place stays
            empty. None: there is no such limit.
        max_queue_size, max_queue_cost: Records, and cost, that may wait, see the README; None: no bound.
        policy: A record that names its tokens reserves, by "guaranteed_no_evict", the most it may use. By
            "max_utilization" background records together reserve what answers of their tenants lead to
            expect, see the README; all records do so if there is no background.
        oversize: A record that costs more than the capacity: "reject" refuses it, "alone" runs it by itself.
        priority_aging_s, tenant_weights: See `RequestQueue`; the former is also how long the foreground may
            keep the background from starting.
        background: The priority from which on records are background: the engine makes them give way, so
            all other records, the foreground, start as if none ran. See the README. None: none gives way.
        lanes: Owner of what records need beside cost, see `Lanes`; None: no record has needs.
        max_starting: Slots of the background that run and are not corrected yet, at most: the work before
            the exact cost is known goes in the order of the queue too. None: no limit.
        clock: Returns the time in seconds, which never goes back; deadlines are on it.
    """

    _runs: set[Slot]

    def __init__(
        self,
        *,
        capacity: int,
        max_running: int | None = None,
        places: int | None = None,
        max_queue_size: int = 5_000,
        max_queue_cost: int | None = None,
        policy: Literal["guaranteed_no_evict", "max_utilization"] = "guaranteed_no_evict",
        oversize: Literal["reject", "alone"] = "reject",
        priority_aging_s: float | None = 10.0,
        tenant_weights: Mapping[str, float] | None = None,
        background: int | None = None,
        lanes: Lanes | None = None,
        max_starting: int | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        checks.whole("places", places, 1, optional=True)
        checks.whole("max_starting", max_starting, 1, optional=True)
        checks.one_of("policy", policy, ("guaranteed_no_evict", "max_utilization"))
        checks.one_of("oversize", oversize, ("reject", "alone"))
        super().__init__(max_queue_size, max_queue_cost, priority_aging_s, tenant_weights, clock, background)
        self._places = sys.maxsize if places is None else places
        self._alone = oversize == "alone"
        self._background = (
            sys.maxsize if background is None else background
        )  # the first priority of the background
        self._window = Window()
        self._promoted = 0  # slots that were promoted so far
        # When a background record has started last, or begun to wait while no other did.
        self._background_at = math.inf if background is None else -math.inf
        self._patience_s = math.inf if priority_aging_s is None else priority_aging_s
        self._outputs = Outputs() if policy == "max_utilization" else None
        self._ask_at = -math.inf  # when slots that run are asked again for their tokens
        self._correction = Correction()
        self._lanes = lanes
        self._wishes: set[str] = set()  # needs that were refused, and not taken since
        self._max_starting = sys.maxsize if max_starting is None else max_starting
        # Records that have ended, and what they produced; the latest weigh most.
        self._ended_records, self._ended_tokens = 1.0, FIRST_OUTPUT
        self._tasks: dict[asyncio.Task[Any], Slot] = {}  # those of `submit`
        self._pause: float | None = None  # when it will end, by estimate
        self.set_capacity(capacity, max_running)

    @property
    def stats(self) -> ContinuousStats:
        """A snapshot, true at this moment."""
        now = self._clock()
        return ContinuousStats(
            **self._common_stats(now),
            running=self._window.records,
            running_cost=self._window.cost,
            capacity=self._window.capacity,
            max_running=None if self._regular == sys.maxsize else self._regular,
            outside_cost=self._queue.outside_cost,
            correction=self._correction.ratio,
            background_running=self._window.background.records,
            background_cost=self._window.background.cost,
            total_promoted=self._promoted,
            caution=self._window.caution(now),
            **self._recorder.window(now),  # type: ignore[arg-type]
        )

    def slot(
        self,
        cost: int | None = None,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        *,
        prompt_tokens: int | None = None,
        max_tokens: int | None = None,
        timeout: float | None = None,
        records: int = 1,
        needs: tuple[str, ...] = (),
    ) -> Slot:
        """Return the place of one record; `async with` waits for space in the queue, and for its start.

        `await slot.enter()` waits for space alone, `slot_nowait` for nothing.

        Args:
            cost: Capacity that the record holds while it runs; or else `prompt_tokens` and `max_tokens`. It
                may be a bound, see `Slot.correct`.
            priority, tenant: Its tier, lower goes first, and the name of its tenant.
            deadline, timeout: Time on `clock` by which it must have started; the same in seconds from now.
            prompt_tokens, max_tokens: Tokens of the prompt, and the tokens that may be produced at most.
            records: Records that start together in this slot; places, cost and tokens are of all of them.
            needs: What the slot needs of `lanes`, once whatever its records.

        Raises:
            ValueError: Neither or both ways of giving a cost are used, or there are needs without `lanes`.
            Expired: The deadline has passed. Entering raises it for a deadline that can't be kept, too.
            Oversize: On entering: the record can never run.
            RuntimeError: On entering: the batcher isn't running (`Closed`), or runs on another event loop.
        """
        if cost is None and prompt_tokens is not None and max_tokens is not None:
            prompt_tokens = whole_cost("prompt_tokens", prompt_tokens)
            max_tokens = whole_cost("max_tokens", max_tokens)
            checks.whole("records", records, 1)
            cost = prompt_tokens + max_tokens
        elif cost is None or prompt_tokens is not None or max_tokens is not None:
            raise ValueError("give either cost, or both prompt_tokens and max_tokens")
        # It is a future only once it has to wait.
        slot = Slot(None, cost, priority, tenant, deadline, records, withdraw=self._withdraw)
        if timeout is not None:
            slot.deadline = self._deadline(deadline, timeout, self._clock(), records)
        slot._batcher = self
        if prompt_tokens is not None and max_tokens is not None:
            slot.prompt_tokens, slot.max_tokens = prompt_tokens, max_tokens
            if self._outputs is not None and self._is_estimated(slot, priority >= self._background):
                length = self._outputs.foresee(tenant, -(-max_tokens // records)).mean
                slot.cost = prompt_tokens + min(max_tokens, math.ceil(records * length))
        if needs:
            if self._lanes is None:
                raise ValueError("needs are for a batcher that was made with lanes")
            slot.needs = tuple(sorted(set(needs)))
        return slot

    def slot_nowait(self, cost: int | None = None, **options: Unpack[SlotOptions]) -> Slot:
        """Enter a slot at once: it runs or waits in the queue when this returns.

        `async with` waits for its start, and gives it back; a slot that isn't used so is given back by
        `Slot.release`. The other arguments and errors are as in `slot` and in entering it.

        Raises:
            QueueFull: There is no space; says when to try again.
        """
        return self.slot(cost, **options).enter_nowait()

    async def submit(
        self,
        process_fn: Callable[[RecordT], Awaitable[ResultT]],
        record: RecordT,
        cost: int | None = None,
        **options: Unpack[SlotOptions],
    ) -> asyncio.Task[ResultT]:
        """Queue one record and return the task that will run `process_fn(record)` in a slot.

        Waits while the queue is full. Cancelling the task takes the record out, or cancels `process_fn`. The
        other arguments and the errors are as in `slot` and in entering it.
        """
        checks.function("process_fn", process_fn)
        return self._run(process_fn, record, await self.slot(cost, **options).enter())

    def submit_nowait(
        self,
        process_fn: Callable[[RecordT], Awaitable[ResultT]],
        record: RecordT,
        cost: int | None = None,
        **options: Unpack[SlotOptions],
    ) -> asyncio.Task[ResultT]:
        """Queue one record at once as `submit` does, or raise `QueueFull`."""
        checks.function("process_fn", process_fn)
        return self._run(process_fn, record, self.slot_nowait(cost, **options))

    def _run(
        self, process_fn: Callable[[RecordT], Awaitable[ResultT]], record: RecordT, slot: Slot
    ) -> asyncio.Task[ResultT]:
        async def process() -> ResultT:
            async with slot:
                return await process_fn(record)

        task = self.loop.create_task(process())
        self._tasks[task] = slot

        def ended(_: object) -> None:
            # A task that is cancelled before its first step never gets to leave its slot by itself.
            self._leave(self._tasks.pop(task), asyncio.CancelledError())
            if self._state != RUNNING and slot.started_at == math.inf and not task.cancelled():
                # Python reports errors that are not looked at: of those that a stop ends, few are.
                task.exception()

        task.add_done_callback(ended)
        return task

    def reopen(self) -> None:
        """Consider again, in their order, the records that were passed by: their needs may succeed now."""
        self._queue.reopen()
        self._decide()

    def set_queue_size(self, max_queue_size: int) -> None:
        """Change how many records may wait; waiting records beyond a smaller number stay."""
        checks.whole("max_queue_size", max_queue_size, 1)
        self._queue.set_max_size(max_queue_size)
        self._decide()

    @property
    def load(self) -> Load:
        """The records that run and wait at this moment, and their tokens."""
        queue = self._queue
        tier = queue.first_priority() or 0
        return Load(self._window.records, queue.total, queue.total_cost, tier, queue.next_deadline())

    def overcommitted(self, records: int = 1) -> None:
        """Note that the engine has preempted records because its memory was full.

        With `max_utilization`, fewer records start for some minutes: after a preemption of a quarter of the
        running records, no more than with `guaranteed_no_evict`. Call it once for all records of a step of
        the engine.
        """
        checks.whole("records", records, 1)
        self._window.overcommitted(records, self._clock())

    @property
    def capacity(self) -> int:
        """Cost that may run at once."""
        return self._window.capacity

    def set_capacity(self, capacity: int, max_running: int | EllipsisType | None = ...) -> None:
        """Change the capacity, also while records run; without `max_running` that bound stays.

        When it shrinks, running records go on, and waiting records that can no longer run fail with
        `Oversize`.
        """
        checks.whole("capacity", capacity, 1)
        if not isinstance(max_running, EllipsisType):
            checks.whole("max_running", max_running, 1, optional=True)
            self._max_running = sys.maxsize if max_running is None else max_running
        self._window.capacity = capacity
        self._bound()
        self._count_time(self._clock())
        for slot in list(self._queue):
            if (error := self._oversize(slot)) is not None:
                self._queue.remove(slot)
                self._end(slot, error)
        self._decide()

    def pause(self, seconds: float = 0.0) -> None:
        """Start nothing until `resume`. Running records go on, and the queue takes records as before.

        `seconds` tells `estimate_wait` how long it will last; a further call changes it. A `stop` then
        refuses waiting records, as with `drain=False`; a `stop` that is under way does so at once.
        """
        checks.seconds("seconds", seconds)
        if self._pause is None:
            for part in (self._window.foreground, self._window.background):
                part.usual = part.records, part.cost
        self._pause = self._clock() + seconds
        self._decide()

    def resume(self) -> None:
        """Start records again."""
        self._pause = None
        self._window.foreground.usual = self._window.background.usual = (0, 0)
        self._decide()

    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        window, now = self._window, self._clock()
        before, ahead = self._queue.ahead(priority, tenant)
        # What runs in the foreground is not in the way of a background record as long as it stays as much:
        # the background passes its places on. With none of it inside, the foreground must leave first.
        behind = priority >= self._background
        part = window.part(behind and any(window.background.inside))
        places, free = window.left(behind, now)
        # The records before them in the queue are served first, but for those that free space takes.
        before -= max(places, 0) - records
        cost_before = ahead * self._correction.ratio + cost - max(free, 0)
        wait = part.rate.time_to_serve(before, cost_before, *part.inside)
        # A pause that lasts longer than was told may end at any time.
        rest = 0.0 if self._pause is None else max(0.0, self._pause - now) or UNKNOWN_WAIT_S
        return rest + (UNKNOWN_WAIT_S if wait is None else wait)

    def _bound(self) -> None:
        """Note how many records may run, without and with the records that wait in the engine."""
        # A record stays a step per token, so by Little's law `places / mean output` of them end in a step.
        ending = STEPS * self._places * self._ended_records / self._ended_tokens
        self._regular = min(self._max_running, self._places)
        standby = min(self._places, math.ceil(ending))
        self._window.most_records = min(self._max_running, self._places + standby)

    def _oversize(self, slot: Slot) -> Oversize | None:
        if slot.cost > self._window.capacity and not self._alone:
            return Oversize(slot.cost, self._window.capacity)
        if slot.records > self._regular:
            what = "max_running" if self._regular == self._max_running else "places"
            return Oversize(slot.records, self._regular, what)
        return None

    def _claim(self, slot: Slot, background: bool) -> Claim:
        """Return the claim of a slot, as background or as foreground."""
        prompt, most, n = slot.prompt_tokens, slot.max_tokens, slot.records
        if prompt is None or most is None:
            return Claim(slot.cost, slot.cost)
        slot._outgrown = max(most, slot.output_tokens) + 1
        bound = prompt + max(most, slot.output_tokens)
        if self._outputs is None or not self._is_estimated(slot, background):
            return Claim(bound, bound)
        each, so_far = -(-most // n), slot.output_tokens // n
        if slot._answer is None:
            forecast = self._outputs.foresee(slot.tenant, each)
        else:
            slot._outgrown = min(slot._outgrown, n * slot._answer.reach(so_far))
            forecast = slot._answer.foresee(each)
        return Claim.of(forecast, prompt, n, so_far, each)

    def _is_estimated(self, slot: Slot, background: bool) -> bool:
        """Return whether a slot claims its expected cost, instead of its largest."""
        return slot.prompt_tokens is not None and (background or self._background == sys.maxsize)

    def _fits(self, slot: Slot, background: bool) -> Claim | None:
        """Return the claim of a slot that may start now, as background or as foreground."""
        window = self._window
        if self._pause is not None or (background and window.background.starting >= self._max_starting):
            return None
        claim = self._claim(slot, background)
        return claim if window.fits(slot.records, claim, background, self._clock()) else None

    def _overdue(self) -> bool:
        """Return whether the foreground has kept the background from starting for too long."""
        if self._clock() < self._background_at + self._patience_s or not self._background_waits():
            return False
        # Background records that only wait for each other take turns by themselves.
        first = self._queue.first_priority()
        return self._window.foreground.records > 0 or (first is not None and first < self._background)

    def _background_waits(self) -> bool:
        last = self._queue.last_priority()
        return last is not None and last >= self._background

    def _next_alarm(self) -> float | None:
        deadline, due = super()._next_alarm(), self._background_at + self._patience_s
        # What is overdue already starts as soon as something ends.
        if not self._clock() < due < math.inf or not self._background_waits():
            return deadline
        return due if deadline is None else min(deadline, due)

    def _resize(self, slot: Slot) -> None:
        """Note that a running slot may claim something else."""
        claim = self._claim(slot, slot._part is self._window.background)
        slot._part.claim(claim, slot._claim)
        slot._claim, slot.cost = claim, claim.cost
        self._count_time(self._clock())

    def _take(self, slot: Slot) -> bool:
        """Take all needs of a slot, or none."""
        lanes, queue = self._lanes, self._queue
        assert lanes is not None
        for number, need in enumerate(slot.needs):
            if not lanes.take(need):
                # All is as it was before: what this gives back was free when others were refused.
                for taken in slot.needs[:number]:
                    lanes.give(taken)
                self._wishes.add(need)
                queue.refuse(need)
                return False
            self._wishes.discard(need)
        slot.held = slot.needs
        return True

    def _give(self, needs: tuple[str, ...]) -> None:
        """Give needs back; records that were passed by are considered by the next decision, if that helps."""
        for need in needs:
            if self._lanes is not None and self._lanes.give(need):
                self._queue.reopen()

    def _enter_slot(self, slot: Slot, wait: bool) -> None:
        """Start a slot if it may start; otherwise it waits in the queue, or for space in it; or refuse it."""
        self._check_open(slot.records)
        if (oversize := self._oversize(slot)) is not None:
            self._recorder.total_rejected += slot.records
            raise oversize
        now = slot.submitted_at = self._clock()
        if slot.deadline is not None:
            self._deadline(slot.deadline, None, now, slot.records)
        background = slot.priority >= self._background
        if not self._queue.total and not slot.needs and (claim := self._fits(slot, background)):
            self._queue.pass_by(slot)
            self._begin(slot, background, claim)
            return
        known = self._window.part(background).rate.known
        if slot.deadline is not None and known:
            wait_s = self.estimate_wait(slot.cost, slot.priority, slot.tenant, records=slot.records)
            if wait_s > HOPELESS * (slot.deadline - now):
                self._recorder.total_rejected += slot.records
                raise Expired(f"the record could not start for about {wait_s:.1f} s, after its deadline")
        asyncio.Future.__init__(slot, loop=self._loop)
        first = background and not self._background_waits()
        if first:
            self._background_at = max(self._background_at, now)
        # One that doesn't fit changes nothing: if it is the first now, what follows waits behind it.
        if not self._queue.put(slot, slot.needs) or self._fits(slot, background):
            self._enter(slot, wait)
        elif slot.deadline is not None or first:
            self._set_alarm()

    def _start_ready(self) -> None:
        """Start the slots whose turn it is, as long as they fit; the foreground may pass the background."""
        queue = self._queue
        if self._pause is not None and self._state == STOPPING:
            self._refuse_all()  # a stop doesn't wait for the end of a pause
        if self._outputs is not None and queue.total and self._clock() >= self._ask_at:
            self._ask()
        while queue.total:
            slot = queue.head(since=self._background) if self._overdue() else None
            overdue = slot is not None
            slot = slot or queue.head()
            background = slot is not None and slot.priority >= self._background
            claim = slot and self._fits(slot, background)
            if background and not claim:
                background = False
                if not overdue:
                    slot = queue.head(before=self._background)
                claim = slot and self._fits(slot, False)
            # An overdue one is waited for as long as it doesn't fit beside the foreground either.
            if not slot or not claim:
                return
            if slot.needs and not self._take(slot):
                continue
            queue.pick(slot)
            slot.charged = slot.cost or 1
            self._begin(slot, background, claim)
            slot.set_result(None)

    def _ask(self) -> None:
        """Ask slots that run how many tokens they have."""
        self._ask_at = self._clock() + ASK_S
        for slot in self._runs:
            if slot._answer is not None and slot._produced is not None:
                slot.report(max(slot.output_tokens, slot._produced()))

    def _end_wishes(self) -> bool:
        # With the last record that waits for a need its wish ends, once.
        ended = sorted(need for need in self._wishes if not self._queue.wants(need))
        self._wishes.difference_update(ended)
        for need in ended:
            if self._lanes is not None and self._lanes.unwanted(need):
                self._queue.reopen()
        return bool(ended)

    def _begin(self, slot: Slot, background: bool, claim: Claim) -> None:
        now = slot.started_at = self._clock()
        slot.waited_s = now - slot.submitted_at
        slot.running = True
        if slot.priority >= self._background:
            self._background_at = now
            slot.promoted = not background
            self._promoted += slot.promoted
        part = slot._part = self._window.part(background)
        if self._outputs is not None and self._is_estimated(slot, background):
            slot._answer = self._outputs.begin(slot.tenant)
            claim = self._claim(slot, background)
        slot._claim = claim
        slot.cost = claim.cost
        part.claim(claim, NOTHING)
        part.records += slot.records
        part.starting += 1
        self._runs.add(slot)
        self._count_time(now)

    def _count_time(self, now: float) -> None:
        """Note that the share of the capacity in use has changed."""
        self._recorder.switch(bool(self._runs), now, self._window.cost / self._window.capacity)

    def _leave(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out, wherever it is, count how it ended, and learn from it."""
        if not slot.running:
            if slot.waiting:
                self._withdraw(slot)
            return
        now = self._clock()
        part, recorder = slot._part, self._recorder
        records, tokens = slot.records, slot.output_tokens
        slot.running = False
        slot.owner = None
        self._runs.remove(slot)
        part.starting -= not slot.corrected
        part.records -= records
        part.claim(NOTHING, slot._claim)
        if slot.held:
            held, slot.held = slot.held, ()
            self._give(held)
        self._count_time(now)
        run_s = now - slot.started_at
        waits = [slot.waited_s] if records == 1 else [slot.waited_s] * min(records, RECENT)
        recorder.ran(records, waits, run_s)
        recorder.output_tokens += tokens
        part.rate.learn(slot.cost, run_s, records)
        if (answer := slot._answer) is not None and slot.max_tokens is not None:
            # An answer that was cut short, or had to end, says only that it came so far.
            ended = error is None and 0 < tokens < slot.max_tokens
            (answer.end if ended else answer.reach)(tokens // records)
        used = slot.cost
        if slot.prompt_tokens is not None:
            used = slot.prompt_tokens + tokens
            if tokens and slot.charged:
                self._queue.settle(slot, slot.charged, used)
        outcome: Outcome = "failed"
        if error is None:
            outcome = "completed"
            recorder.total_completed += records
            recorder.completed_cost += slot.cost
            recorder.latency_s += records * (slot.waited_s + run_s)
            if self._places < sys.maxsize:
                self._ended_records = self._ended_records * OUTPUT_MEMORY + records
                self._ended_tokens = self._ended_tokens * OUTPUT_MEMORY + max(records, tokens)
                self._bound()
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = "cancelled"
            recorder.total_cancelled += records
        else:
            recorder.total_failed += records
        if recorder.observations is not None:
            for number in range(records):
                each = (used + number) // records  # whole parts, of which the sum is `used`
                seen = Observation(slot.tenant, slot.priority, each, slot.waited_s, run_s, outcome)
                recorder.observations.records.append(seen)
        if self._queue.total or self._ended is not None:
            self._decide()

    def _abort(self) -> list[asyncio.Task[Any]]:
        for task, slot in self._tasks.items():
            if slot.running:
                task.cancel()
        return list(self._tasks)
