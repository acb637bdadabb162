"""The door of a batcher: who gets in, who waits outside for room, who is too late, and when it closes."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from enum import Enum
from typing import Any, Generic, Protocol, TypeVar

from batcher import checks
from batcher.errors import BatcherError, Closed, Expired, QueueFull
from batcher.fair_share import Queued
from batcher.promises import Promises
from batcher.queue import EntryT, RequestQueue
from batcher.stats import Recorder

EntryT_contra = TypeVar("EntryT_contra", bound=Queued, contravariant=True)

UNKNOWN_WAIT_S = 1.0
"""The estimate of a wait as long as nothing has finished."""

GRACE_S = 1.0
"""Seconds that a cancelled task has to end before a stop no longer waits for it."""

LATE = "the deadline passed before the record could start"


class State(Enum):
    """Where a batcher is in its life."""

    STOPPED = "not running; call start() or use `async with`"
    RUNNING = "running"
    STOPPING = "stopping"


class Owner(Protocol[EntryT_contra]):
    """What a batcher does for its intake."""

    def _fail(self, entry: EntryT_contra, error: BatcherError) -> None:
        """Tell the caller of an entry that left the queue unserved."""

    def _abandon(self, entry: EntryT_contra) -> None:
        """Take out an entry that got in at the moment when its caller was cancelled."""

    def _advance(self) -> None:
        """Start what can start: entries have come, or left."""

    def _idle(self) -> bool:
        """Return whether nothing runs, or is about to."""

    def _drop_formed(self, error: BatcherError) -> None:
        """Fail what has left the queue and has not started."""

    def _abort(self) -> list["asyncio.Task[Any]"]:
        """Give up what runs; return the tasks that are still to end."""

    def estimate_wait(self, cost: int, priority: int = 0, tenant: str | None = None) -> float:
        """Return the seconds that a record would wait."""


class Intake(Generic[EntryT]):
    """Lets entries into a queue, in order, and ends those that can't wait any longer.

    Args:
        owner: The batcher.
        queue: Where entries wait.
        recorder: Where entries are counted.
        clock: The queue's clock.
    """

    def __init__(
        self,
        owner: Owner[EntryT],
        queue: RequestQueue[EntryT],
        recorder: Recorder,
        clock: Callable[[], float],
    ) -> None:
        self.state = State.STOPPED
        self._owner = owner
        self._name = type(owner).__name__
        self._queue = queue
        self._recorder = recorder
        self._clock = clock
        self._loop: asyncio.AbstractEventLoop | None = None
        # The entries that wait for room, first come first in; the background stands in a line of its own,
        # behind. Not bounded: each is a suspended caller.
        self._lines: tuple[_Line[EntryT], _Line[EntryT]] = (_Line(), _Line())
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._emptied: asyncio.Future[None] | None = None
        self._promises = Promises()

    @property
    def outside(self) -> int:
        """How many wait for room."""
        first, last = self._lines
        return first.size + last.size

    @property
    def outside_cost(self) -> int:
        """What they cost."""
        first, last = self._lines
        return first.cost + last.cost

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The loop on which the batcher was started."""
        if self._loop is None:
            raise Closed(f"{self._name} is {self.state.value}")
        return self._loop

    def open(self) -> None:
        """Start to let entries in.

        Raises:
            RuntimeError: It is open already, or still closing.
        """
        if self.state is not State.STOPPED:
            raise RuntimeError(f"{self._name} is already {self.state.value}")
        self._loop = asyncio.get_running_loop()
        self.state = State.RUNNING
        self._recorder.open(self._clock())

    def turn_away(self) -> Closed:
        """Count an entry that comes while nobody is let in, and return what to tell its caller."""
        self._recorder.rejected += 1
        return Closed(f"{self._name} is {self.state.value}")

    def check_deadline(self, entry: EntryT) -> None:
        """Raise Expired if the deadline of a new entry has passed."""
        if entry.deadline is not None and entry.deadline <= self._clock():
            self._recorder.rejected += 1
            raise Expired("the deadline passed before the record was submitted")

    def ahead(self, priority: int, tenant: str | None = None) -> tuple[int, int]:
        """Return how many wait for room before or with a class, and their cost together.

        Args:
            priority: The class.
            tenant: Whose record comes: those of others don't go before it; None: all do.
        """
        if tenant is not None:
            waiting = self._lines[priority >= self._queue.background].tenants.get(tenant)
            return (len(waiting), sum(entry.cost for entry in waiting.values())) if waiting else (0, 0)
        first, last = self._lines
        if priority < self._queue.background:
            return first.size, first.cost
        return first.size + last.size, first.cost + last.cost

    def full(self, entry: EntryT) -> tuple[str, int] | None:
        """Return the bound that keeps a new entry out, or None; it passes none of its tenant that waits."""
        queue = self._queue
        bound = queue.full(entry)
        if bound is None and (waiting := self._line(entry).tenants.get(entry.tenant)):
            return queue.full(next(iter(waiting.values())))
        return bound

    def enter(self, entry: EntryT) -> None:
        """Let an entry in at once.

        Raises:
            QueueFull: There is no room, or others wait for it already.
        """
        bound = self.full(entry)
        if bound is not None:
            self._recorder.rejected += 1
            raise QueueFull(*bound, retry_after_s=self._retry_after(entry))
        self.put(entry)

    def _retry_after(self, entry: EntryT) -> float:
        wait = self._owner.estimate_wait(entry.cost, entry.priority, entry.tenant)
        records = self._queue.ahead(entry.priority, entry.tenant)[0] + 1
        return self._promises.after(self._clock(), entry.priority, wait, wait / records)

    def put(self, entry: EntryT) -> None:
        """Let an entry in that there is room for."""
        self._queue.put(entry)
        self._recorder.submitted += 1
        if entry.deadline is not None:
            self._watch_deadlines()

    async def enter_when_room(self, entry: EntryT) -> None:
        """Wait for room, behind those who wait already, then let an entry in.

        Raises:
            Expired: The deadline passed first.
            Closed: The batcher stopped first.
        """
        room: asyncio.Future[None] = self.loop.create_future()
        alarm = None
        if entry.deadline is not None:
            alarm = self.loop.call_later(entry.deadline - self._clock(), self._give_up, room)
        self._line(entry).add(room, entry)
        try:
            await room
        except BaseException:
            if self._line(entry).drop(room, entry):
                # Whoever stood behind may fit where this one did not.
                self._owner._advance()
            elif not room.cancelled() and room.exception() is None:
                self._owner._abandon(entry)
            raise
        finally:
            if alarm is not None:
                alarm.cancel()

    def admit(self) -> None:
        """Let those in who wait outside, as far as there is room now."""
        for line in self._lines:
            entered = True
            while entered:
                entered = False
                for waiting in list(line.tenants.values()):
                    room, entry = next(iter(waiting.items()))
                    if self._queue.full(entry):
                        continue
                    entered = True
                    line.drop(room, entry)
                    if not room.done():
                        self.put(entry)
                        room.set_result(None)

    def expire(self) -> None:
        """End every entry whose deadline has passed."""
        for entry in self._queue.expire():
            self._recorder.expired += 1
            self._owner._fail(entry, Expired(LATE))

    async def close(self, drain: bool, timeout: float | None) -> None:  # noqa: ASYNC109
        """See off what is there, then stop: what `stop` of both batchers does."""
        if timeout is not None:
            checks.seconds("timeout", timeout)
        if self.state is State.STOPPED:
            return
        self.state = State.STOPPING
        if self._emptied is None:
            self._emptied = self.loop.create_future()
        emptied = self._emptied
        if not drain:
            self._refuse_all()
        self._owner._advance()
        self.check_emptied()
        await asyncio.wait((emptied,), timeout=timeout)
        if not emptied.done():
            self._refuse_all()
            tasks = self._owner._abort()
            if tasks:
                await asyncio.wait(tasks, timeout=GRACE_S)
        if self._emptied is emptied:
            # Of several calls that wait here, the first one locks up; it also lets the others go.
            self._emptied = None
            if not emptied.done():
                emptied.set_result(None)
            if self._alarm is not None:
                self._alarm.cancel()
                self._alarm = None
            self._recorder.close(self._clock())
            self.state = State.STOPPED

    def check_emptied(self) -> None:
        """Let `close` go on if everything is gone."""
        emptied = self._emptied
        if emptied is None or emptied.done() or self.outside or self._queue.size:
            return
        if self._owner._idle():
            emptied.set_result(None)

    def _refuse_all(self) -> None:
        closed = f"{self._name} was stopped before the record could start"
        for line in self._lines:
            for room, entry in line.all():
                line.drop(room, entry)
                if not room.done():
                    self._recorder.rejected += 1
                    room.set_exception(Closed(closed))
        for entry in self._queue.clear():
            self._recorder.failed += 1
            self._owner._fail(entry, Closed(closed))
        self._owner._drop_formed(Closed(closed))

    def _watch_deadlines(self) -> None:
        """See to it that `expire` runs when the earliest deadline passes."""
        deadline = self._queue.next_deadline()
        if deadline is None:
            return
        if self._alarm is not None:
            if self._alarm_at <= deadline:
                return
            self._alarm.cancel()
        self._alarm_at = deadline
        self._alarm = self.loop.call_later(deadline - self._clock(), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.expire()
        self._owner._advance()
        self._watch_deadlines()

    def _give_up(self, room: asyncio.Future[None]) -> None:
        if not room.done():
            self._recorder.rejected += 1
            room.set_exception(Expired("the deadline passed before there was room in the queue"))

    def _line(self, entry: EntryT) -> "_Line[EntryT]":
        return self._lines[entry.priority >= self._queue.background]


class _Line(Generic[EntryT]):
    """Entries that wait for room: those of a tenant in order, the tenants in turn."""

    __slots__ = ("cost", "size", "tenants")

    def __init__(self) -> None:
        self.tenants: dict[str, OrderedDict[asyncio.Future[None], EntryT]] = {}
        self.size = 0
        self.cost = 0

    def all(self) -> list[tuple[asyncio.Future[None], EntryT]]:
        return [item for waiting in self.tenants.values() for item in waiting.items()]

    def add(self, room: asyncio.Future[None], entry: EntryT) -> None:
        self.tenants.setdefault(entry.tenant, OrderedDict())[room] = entry
        self.size += 1
        self.cost += entry.cost

    def drop(self, room: asyncio.Future[None], entry: EntryT) -> bool:
        """Take an entry out; return whether it was there."""
        waiting = self.tenants.get(entry.tenant)
        if waiting is None or waiting.pop(room, None) is None:
            return False
        if not waiting:
            del self.tenants[entry.tenant]
        self.size -= 1
        self.cost -= entry.cost
        return True
