"""The window: what runs in an engine, what may run beside it, and the slots that hold its places."""

import asyncio
import math
import sys
from collections.abc import Callable
from typing import Any, Self

from batcher import checks
from batcher.costs import OutputEstimator
from batcher.entries import Entry
from batcher.errors import Oversize
from batcher.goals import Background
from batcher.stats import RECENT, Outcome, Recorder

# Steps between the end of a record and the first step of one that is only then let in: the end is told with
# one step, and the next is planned by then.
STEPS = 2
FIRST_OUTPUT = 64.0  # tokens that a record is expected to produce before one has ended
OUTPUT_MEMORY = 1 - 1 / 64  # weight that a record keeps in the mean output when the next one ends
MEMORY = 1 - 1 / 256  # weight that a record keeps in the measured rate of service when the next one ends
ENOUGH = 16  # records to measure before the rate is used


class Slot(Entry[None]):
    """The place of one record in the window, or of several; `async with` waits for it and gives it back.

    Attributes:
        cost: What it holds of the capacity now.
        prompt_tokens: Tokens of the prompt; None: it was given a cost instead.
        max_tokens: The most tokens that may be produced.
        wait: Whether it waits for space when the queue is full.
        running: Whether it is in the window.
        arrived_at: Time from which its TTFT counts for goals; None: its submission.
        started_at: Time at which it started.
        first_at: Time of its first token; 0 before.
        waited_s: Seconds from submission to start.
        output_tokens: Tokens reported so far.
        charged: What its tenant was charged for it.
        used: Whether it was entered.
        owner: The task that holds it.
    """

    wait: bool = False
    prompt_tokens: int | None = None
    max_tokens: int | None = None
    output_tokens: int = 0
    running: bool = False
    arrived_at: float | None = None
    started_at: float = 0.0
    first_at: float = 0.0
    waited_s: float = 0.0
    charged: int = 0
    used: bool = False
    owner: asyncio.Task[Any] | None = None

    def __init__(
        self,
        window: "Window",
        cost: int,
        priority: int,
        tenant: str,
        deadline: float | None,
        records: int,
    ) -> None:
        # It is a future only once it has to wait.
        super().__init__(None, cost, priority, tenant, deadline, records, withdraw=window.withdraw)
        self._window = window

    async def __aenter__(self) -> Self:
        self._window.enter(self)
        await self.started()
        return self

    async def __aexit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._window.leave(self, error)

    async def started(self) -> None:
        """Wait until it starts; it is held by the calling task."""
        self.owner = asyncio.current_task(self._window.loop)
        if self.running:
            return
        try:
            await self
        except BaseException as error:
            # It may have started just before its caller was cancelled.
            self._window.leave(self, error)
            raise

    def release(self) -> None:
        """Give the place back before the block ends; more than once does no harm.

        A caller that waits to enter the slot gets `Aborted`.
        """
        self._window.leave(self, None)

    def first_token(self) -> None:
        """Tell that the first token is there: for the statistics, and for goals to be held against."""
        self._window.first_token(self)

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
            self._window.outgrown(self)


class ServiceRate:
    """The rate at which a window of records serves cost, from the time that finished ones spent in it.

    By Little's law a window that holds `inside` records of which each stays `mean` seconds lets
    inside / mean of them go per second. The same holds for cost, with the mean taken by cost.
    """

    def __init__(self) -> None:
        self._records = 0.0
        self._seconds = 0.0
        self._cost = 0.0
        self._cost_seconds = 0.0

    @property
    def known(self) -> bool:
        """True once enough has been measured to refuse a record for it."""
        return self._records > ENOUGH

    def learn(self, cost: int, seconds: float, records: int = 1) -> None:
        """Take in records of `cost` together that were inside for `seconds`."""
        self._records = self._records * MEMORY + records
        self._seconds = self._seconds * MEMORY + records * seconds
        self._cost = self._cost * MEMORY + cost
        self._cost_seconds = self._cost_seconds * MEMORY + cost * seconds

    def time_to_serve(self, records: int, cost: int, records_inside: int, cost_inside: int) -> float | None:
        """Return the seconds until so much has left the window; None: nothing has been measured yet."""
        if not self._records or not records_inside:
            return None
        wait = max(0, records) * self._seconds / self._records / records_inside
        if self._cost and cost_inside:
            wait = max(wait, max(0, cost) * self._cost_seconds / self._cost / cost_inside)
        return wait


class Window:
    """The slots that run, and the bounds of their cost and number.

    Attributes:
        regular: Records that may run at once, without those that wait in the engine.
        most: The same, with them.
        running: The slots that run; their records and their cost are counted.
        rate: The rate at which they are served.
        enter: Lets a slot in, or into the queue.
        leave: Takes a slot out, wherever it is.
        loop: The event loop of the tasks that hold slots: to look for it takes Python 3.11 a system call.
        withdraw: Takes a slot out of the queue that was cancelled.

    Args:
        places: Records in one step of the engine; None: it has no such limit.
        learns: Output is reserved as learned from finished records, not as much as there may be.
        alone: A slot that costs more than the capacity may run alone.
        background: The tiers that run beside the foreground.
    """

    enter: Callable[[Slot], None]
    leave: Callable[[Slot, BaseException | None], None]
    withdraw: Callable[[Slot], None]
    loop: asyncio.AbstractEventLoop

    def __init__(
        self,
        places: int | None,
        learns: bool,
        alone: bool,
        background: Background,
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self._places = sys.maxsize if places is None else places
        self._learns = learns
        self._alone = alone
        self._background = background
        self._recorder = recorder
        self._clock = clock
        self._outputs = OutputEstimator()
        self.rate: ServiceRate = ServiceRate()
        self._background_rate = ServiceRate()
        # Records that have ended, and what they produced; the latest weigh most.
        self._ended_records, self._ended_tokens = 1.0, FIRST_OUTPUT
        self.capacity: int = 1
        self.regular: int = sys.maxsize
        self.most: int = sys.maxsize
        self._max_running = sys.maxsize
        self.running: set[Slot] = set()
        self.records: int = 0
        self.cost: int = 0
        self._resumes_at: float | None = None
        self._before_pause = (0, 0)

    # Bounds

    @property
    def paused(self) -> bool:
        """True while nothing may start."""
        return self._resumes_at is not None

    @property
    def pause_s(self) -> float:
        """Seconds that the pause will last, by estimate; 0 without one."""
        return 0.0 if self._resumes_at is None else max(0.0, self._resumes_at - self._clock())

    def pause(self, seconds: float) -> None:
        """Let nothing start, for as long as `seconds` by estimate."""
        if self._resumes_at is None:
            self._before_pause = (self.records, self.cost)
        self._resumes_at = self._clock() + seconds

    def resume(self) -> None:
        """Let slots start again."""
        self._resumes_at = None

    def resize(self, capacity: int, max_running: int | None) -> None:
        """Change what may run at once; `max_running` None: as many as before."""
        if max_running is not None:
            self._max_running = max_running
        self.capacity = capacity
        self._recorder.switch(bool(self.running), self._clock(), self.cost / capacity)
        self._bound()

    def _bound(self) -> None:
        """Note how many records may run, without those that wait in the engine and with them.

        A record stays a step per token, so by Little's law `places / mean output` of them end in a step.
        """
        ending = STEPS * self._places * self._ended_records / self._ended_tokens
        self.regular = min(self._max_running, self._places)
        self.most = min(self._max_running, self._places + min(self._places, math.ceil(ending)))

    def oversize(self, slot: Slot) -> Oversize | None:
        """Return why a slot can never start, if it can't."""
        if slot.cost > self.capacity and not self._alone:
            return Oversize(slot.cost, self.capacity)
        if slot.records > 1 and slot.records > self.regular:
            what = "max_running" if self.regular == self._max_running else "places"
            return Oversize(slot.records, self.regular, what)
        return None

    def held_back(self, slot: Slot) -> bool:
        """Return whether a slot is of the background and must leave space for the foreground."""
        background = self._background
        return slot.priority >= background.priority and not background.admits(
            slot.cost, slot.records, self.capacity, self.regular
        )

    def wait(self, before: int, ahead: int, cost: int, priority: int, records: int) -> float | None:
        """Return the seconds until records may start, with so many before them, and so much cost.

        What waits before them is served first, less what free space takes. None: it isn't known.
        """
        places, free = self.most - self.records, self.capacity - self.cost
        running, running_cost, rate = self.records, self.cost, self.rate
        if self.paused:
            # What runs ends in the pause; afterwards as much runs as before it.
            running, running_cost = map(max, (running, running_cost), self._before_pause)
        background = self._background
        if priority >= background.priority:
            most, most_cost = background.places(self.capacity, self.regular)
            running, running_cost, rate = background.running, background.cost, self._background_rate
            places, free = min(places, most - running), min(free, most_cost - running_cost)
        if not before and cost <= free and places >= records:
            return 0.0
        before, ahead = before + records - max(places, 0), ahead + cost - max(free, 0)
        return rate.time_to_serve(before, ahead, running, running_cost)

    # Slots

    def fits(self, slot: Slot) -> bool:
        """Return whether a slot may start beside what runs."""
        return not self.paused and (
            not self.running
            or (self.cost + slot.cost <= self.capacity and self.records + slot.records <= self.most)
        )

    def begin(self, slot: Slot) -> None:
        """Start a slot."""
        now = slot.started_at = self._clock()
        slot.waited_s = now - slot.submitted_at
        slot.running = True
        self.running.add(slot)
        self.records += slot.records
        self.cost += slot.cost
        self._recorder.switch(True, now, self.cost / self.capacity)
        prompt = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens
        self._background.begin(slot.priority, slot.cost, slot.records, prompt)

    def end(self, slot: Slot, error: BaseException | None) -> None:
        """Take a slot out of the window, and count how it ended."""
        now = self._clock()
        slot.running = False
        slot.owner = None
        self.running.remove(slot)
        self.records -= slot.records
        self.cost -= slot.cost
        recorder, records, run_s = self._recorder, slot.records, now - slot.started_at
        recorder.switch(bool(self.running), now, self.cost / self.capacity)
        recorder.ran(records, [slot.waited_s] * min(records, RECENT), run_s)
        outcome: Outcome = "failed"
        if error is None:
            outcome = "completed"
            recorder.total_completed += records
            recorder.completed_cost += slot.cost
            recorder.latency_s += records * (slot.waited_s + run_s)
        elif isinstance(error, asyncio.CancelledError | GeneratorExit):
            outcome = "cancelled"
            recorder.total_cancelled += records
        else:
            recorder.total_failed += records
        if recorder.observations is not None:
            used = slot.cost if slot.prompt_tokens is None else slot.prompt_tokens + slot.output_tokens
            for number in range(records):
                part = used * (number + 1) // records - used * number // records
                recorder.observe(slot.tenant, slot.priority, part, slot.waited_s, run_s, outcome)
        self._learn(slot, now, finished=error is None)

    def _learn(self, slot: Slot, now: float, finished: bool) -> None:
        """Take in what the estimates for later records use."""
        records, run_s = slot.records, now - slot.started_at
        self.rate.learn(slot.cost, run_s, records)
        if finished and self._places < sys.maxsize:
            self._ended_records = self._ended_records * OUTPUT_MEMORY + records
            self._ended_tokens = self._ended_tokens * OUTPUT_MEMORY + max(records, slot.output_tokens)
            self._bound()
        background = self._background
        background.grow(slot.priority, -slot.cost, -records)
        if slot.priority >= background.priority:
            self._background_rate.learn(slot.cost, run_s, records)
        elif slot.first_at and slot.output_tokens > records:
            background.answered((now - slot.first_at) / (slot.output_tokens / records - 1))
        self._recorder.output_tokens += slot.output_tokens
        if slot.output_tokens and slot.prompt_tokens is not None and finished and self._learns:
            self._outputs.learn(slot.output_tokens // records)

    def outgrown(self, slot: Slot) -> None:
        """Reserve more for a slot that has used up what was reserved for it."""
        if slot.prompt_tokens is None or slot.max_tokens is None:
            return
        expected = self.reserved(slot.max_tokens, slot.records, slot.output_tokens)
        cost = slot.prompt_tokens + max(expected, slot.output_tokens)
        self.cost += cost - slot.cost
        self._background.grow(slot.priority, cost - slot.cost)
        slot.cost = cost
        self._recorder.switch(True, self._clock(), self.cost / self.capacity)

    def reserved(self, max_tokens: int, records: int, so_far: int = 0) -> int:
        """Return the tokens to reserve for the output of some records together."""
        if not self._learns:
            return max_tokens
        return min(max_tokens, records * self._outputs.expect(-(-max_tokens // records), so_far // records))

    def first_token(self, slot: Slot) -> None:
        """Take in that a slot has its first token; one that was not entered has none."""
        if slot.admitted and not slot.first_at:
            slot.first_at = self._clock()
            self._recorder.first_token(slot.first_at - slot.submitted_at)
            if slot.priority < self._background.priority:
                arrived_at = slot.submitted_at if slot.arrived_at is None else slot.arrived_at
                self._background.first_token(slot.first_at - arrived_at)
