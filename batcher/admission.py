"""The base of both batchers: their states, and the one function that decides about records."""

import asyncio
from abc import ABC, abstractmethod
from asyncio import _get_running_loop
from collections.abc import Callable, Mapping
from enum import Enum
from typing import Any, Generic, Self, TypeVar

from batcher import checks
from batcher.entries import Queued
from batcher.errors import LATE, BatcherError, Closed, Expired, QueueFull
from batcher.queue import RequestQueue
from batcher.rates import retry_after
from batcher.stats import Observations, Recorder

EntryT = TypeVar("EntryT", bound=Queued)

UNKNOWN_WAIT_S = 1.0
"""The estimate of a wait as long as nothing has finished."""

GRACE_S = 1.0
"""Seconds that a cancelled task has to end before a stop no longer waits for it."""


LEAST_DELAY_S = 1e-6
"""Seconds of the shortest timer: one that comes too early, by rounding, must not come again at once."""


class State(Enum):
    """State of a batcher."""

    STOPPED = "not running; call start() or use `async with`"
    RUNNING = "running"
    STOPPING = "stopping"


class Batcher(ABC, Generic[EntryT]):
    """A queue of records, and what decides about them.

    Whatever happens (a record comes, ends or is cancelled, a deadline passes, the capacity changes, the
    batcher stops) ends in `_decide`.
    """

    def __init__(self, queue: RequestQueue[EntryT], clock: Callable[[], float]) -> None:
        self._queue = queue
        self._recorder = Recorder()
        self._clock = clock
        self._state = State.STOPPED
        self._loop: asyncio.AbstractEventLoop | None = None
        self._deciding = self._again = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._ended: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """True while records are let in."""
        return self._state is State.RUNNING

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it was started.

        Raises:
            RuntimeError: It has not been started.
        """
        if self._loop is None:
            raise Closed(f"{type(self).__name__} is {self._state.value}")
        return self._loop

    def observe(self, limit: int = 65_536) -> Observations:
        """Keep from now on what each record took, and return where it is kept.

        Args:
            limit: Records that are kept until they are taken; beyond it the oldest are dropped.
        """
        checks.whole("limit", limit, 1)
        self._recorder.observations = Observations(limit)
        return self._recorder.observations

    def weigh(self, tenant: str, weight: float | None) -> None:
        """Give a tenant a weight of its own, from now on; see `RequestQueue.weigh`."""
        self._queue.weigh(tenant, weight)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change the tenants' shares, also of those that wait; see `RequestQueue.set_tenant_weights`."""
        self._queue.set_tenant_weights(weights)

    @abstractmethod
    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        """Return the seconds that a record submitted now would wait for its start.

        Args:
            cost: What the record costs.
            priority: Its tier; what waits in lower tiers doesn't count.
            tenant: Its tenant; None: it goes behind its whole tier.
            records: Records that come together; the cost is of all of them.
        """

    # Life

    async def start(self) -> None:
        """Let records in.

        Raises:
            RuntimeError: It runs already, or is still stopping.
        """
        self._abandon_closed_loop()
        if self._state is not State.STOPPED:
            raise RuntimeError(f"{type(self).__name__} is already {self._state.value}")
        self._loop = asyncio.get_running_loop()
        self._state = State.RUNNING
        self._recorder.open(self._clock())

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Refuse new records, finish the others, then stop. May be called twice, and again later.

        Args:
            drain: Let what waits run first; False: it fails with `Closed`. What runs may finish.
            timeout: Seconds after which what still waits fails with `Closed`, and the functions that the
                batcher runs are cancelled. A thread can't be: its result is dropped. Slots that callers
                hold by then are no longer waited for.

        Raises:
            RuntimeError: It is called from what it would wait for, or from another event loop.
            ValueError: The timeout is negative or not finite.
        """
        checks.flag("drain", drain)
        if timeout is not None:
            checks.seconds("timeout", timeout)
        self._abandon_closed_loop()
        if self._state is State.STOPPED:
            return
        self._check_loop()
        if self._deciding or self._waits_for(asyncio.current_task()):
            raise RuntimeError("stop() would wait for its own caller; call it from another task")
        self._state = State.STOPPING
        if self._ended is None:
            self._ended = self.loop.create_future()
        ended = self._ended
        if not drain:
            self._refuse_all()
        self._decide()
        await asyncio.wait((ended,), timeout=timeout)
        if not ended.done():
            self._refuse_all()
            tasks = self._abort()
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE_S)
        if self._ended is ended:
            # Of several calls that wait here the first one ends it, for the others too.
            if not ended.done():
                ended.set_result(None)
            self._close()

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, kind: object, error: object, trace: object) -> None:
        # An error of the block is not held up by what waits.
        await self.stop(drain=error is None)

    def _close(self) -> None:
        self._ended = None
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._recorder.close(self._clock())
        self._state = State.STOPPED

    def _abandon_closed_loop(self) -> None:
        """Forget what is left of a life whose event loop was closed without a stop."""
        if self._state is State.STOPPED or not self.loop.is_closed():
            return
        for entry in self._queue.clear():
            self._count_unserved(entry, late=False)
        self._abandon()
        self._alarm = None
        self._close()

    # Admission

    def _check_open(self, records: int = 1) -> None:
        """Raise unless records may be submitted here and now."""
        if self._state is not State.RUNNING:
            self._recorder.rejected += records
            raise Closed(f"{type(self).__name__} is {self._state.value}")
        self._check_loop()

    def _check_loop(self) -> None:
        if _get_running_loop() is not self._loop:
            raise RuntimeError(
                f"{type(self).__name__} belongs to another event loop; use it there, or a ThreadClient"
            )

    def _deadline(self, deadline: float | None, timeout: float | None, now: float, records: int = 1) -> float:
        """Return the deadline that a record was given, in either way."""
        if timeout is None:
            checks.instant("deadline", deadline)
        elif deadline is not None:
            raise ValueError("give either deadline, a time on the clock, or timeout, seconds from now")
        else:
            checks.seconds("timeout", timeout)
            deadline = now + timeout
        assert deadline is not None
        if deadline <= now:
            self._recorder.rejected += records
            raise Expired("the deadline passed before the record was submitted")
        return deadline

    def _enter(self, entry: EntryT, wait: bool) -> None:
        """Put an entry into the queue, and start it if it may; without space it waits, or is refused."""
        queue = self._queue
        if queue.put(entry) and self._unchanged():
            deadline = entry.deadline
            if deadline is None or (self._alarm is not None and self._alarm_at <= deadline):
                return
        self._decide()
        if entry.refusal is not None:
            raise entry.refusal
        if entry.admitted or wait:
            return
        bound = queue.full(entry)
        queue.remove(entry)
        self._recorder.rejected += entry.records
        seconds = self.estimate_wait(entry.cost, entry.priority, entry.tenant, records=entry.records)
        if tenant := queue.tenant(entry.tenant):
            seconds = retry_after(
                tenant, entry.priority, seconds, queue.own(entry.priority, entry.tenant), self._clock()
            )
        raise QueueFull(bound.name, bound.value, seconds)

    async def _wait_for_space(self, entry: EntryT, withdraw: Callable[[BaseException], object]) -> None:
        """Wait until an entry is admitted that waits outside; `withdraw` takes it back if that fails.

        Raises:
            BatcherError: It was refused.
        """
        entry.space = self.loop.create_future()
        try:
            await entry.space
            if entry.refusal is not None:
                raise entry.refusal
        except BaseException as error:
            withdraw(error)
            raise

    def _decide(self) -> None:
        """Decide what becomes of the entries, in this order."""
        if self._deciding:
            # Something that was started has ended before it gave way, or cancels others.
            self._again = True
            return
        queue = self._queue
        self._deciding = self._again = True
        try:
            while self._again:
                self._again = False
                # 1. What comes too late ends.
                self._end_late()
                # 2. What may start, starts.
                self._start_ready()
                # 3. What waits outside comes in where there is space now.
                for entry in queue.admit():
                    if entry.space is not None and not entry.space.done():
                        entry.space.set_result(None)
        finally:
            self._deciding = False
        # 4. The next deadline brings us back.
        due = self._next_due()
        if due is not None and (self._alarm is None or due < self._alarm_at):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = due
            self._alarm = self.loop.call_later(max(LEAST_DELAY_S, due - self._clock()), self._ring)
        # 5. A stop ends when nothing is left.
        if self._ended is not None and not queue.total and self._idle() and not self._ended.done():
            self._ended.set_result(None)

    def _ring(self) -> None:
        self._alarm = None
        self._decide()

    def _next_due(self) -> float | None:
        """Return when the next deadline passes."""
        return self._queue.next_deadline()

    def _end_late(self) -> None:
        """End the entries whose deadline has passed."""
        for entry in self._queue.expire():
            outside = "the deadline passed before there was space in the queue"
            self._end(entry, Expired(LATE if entry.admitted else outside))

    def _refuse_all(self) -> None:
        """End all that has not started."""
        message = f"{type(self).__name__} was stopped before the record could start"
        for entry in self._queue.clear():
            self._end(entry, Closed(message))

    def _count_unserved(self, entry: EntryT, late: bool) -> None:
        if not entry.admitted:
            self._recorder.rejected += entry.records
        elif late:
            self._recorder.expired += entry.records
        else:
            self._recorder.failed += entry.records

    def _end(self, entry: EntryT, error: BatcherError) -> None:
        """Count an entry that has left the queue unserved, and tell its caller."""
        self._count_unserved(entry, isinstance(error, Expired))
        self._tell(entry, error)

    def _tell(self, entry: EntryT, error: BatcherError) -> None:
        """Tell the caller of an entry that it has left the queue unserved."""
        entry.refusal = error
        if entry.space is not None and not entry.space.done():
            entry.space.set_result(None)

    # Steps that each batcher takes in its own way

    def _unchanged(self) -> bool:
        """Return whether one more entry in the queue gives nothing to decide."""
        return False

    @abstractmethod
    def _start_ready(self) -> None:
        """Start what may start."""

    @abstractmethod
    def _idle(self) -> bool:
        """Return whether nothing runs, or is about to."""

    @abstractmethod
    def _waits_for(self, task: "asyncio.Task[Any] | None") -> bool:
        """Return whether a stop waits for a task."""

    @abstractmethod
    def _abort(self) -> list["asyncio.Task[Any]"]:
        """Give up what runs; return the tasks that are still to end."""

    @abstractmethod
    def _abandon(self) -> None:
        """Forget what ran on an event loop that is closed."""
