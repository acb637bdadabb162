"""The base of both batchers: their states, and the one function that decides about records."""

import asyncio
import contextvars
from abc import ABC, abstractmethod
from asyncio import _get_running_loop
from collections import deque
from collections.abc import Callable, Mapping
from threading import get_ident
from typing import Any, Generic, Self

from batcher import checks
from batcher.errors import LATE, BatcherError, Closed, Expired, QueueFull
from batcher.queue import EntryT, RequestQueue
from batcher.stats import Observations, Recorder

UNKNOWN_WAIT_S = 1.0  # the estimate of a wait as long as nothing has finished
GRACE_S = 1.0  # seconds that a cancelled task has to end before a stop no longer waits for it
LEAST_DELAY_S = 1e-6  # the shortest timer: one that comes too early, by rounding, must not come again at once

# States of a batcher, in the words of its errors.
STOPPED = "not running; call start() or use `async with`"
RUNNING = "running"
STOPPING = "stopping"


class Batcher(ABC, Generic[EntryT]):
    """A queue of records, and what decides about them.

    Whatever happens (a record comes, ends or is cancelled, a deadline passes, the capacity changes, the
    batcher stops) ends in `_decide`.
    """

    def __init__(
        self,
        max_queue_size: int,
        max_queue_cost: int | None,
        priority_aging_s: float | None,
        tenant_weights: Mapping[str, float] | None,
        clock: Callable[[], float],
        background: int | None = None,
    ) -> None:
        checks.whole("max_queue_size", max_queue_size, 1)
        checks.whole("max_queue_cost", max_queue_cost, 1, optional=True)
        self._queue: RequestQueue[EntryT] = RequestQueue(
            clock=clock,
            max_size=max_queue_size,
            max_cost=max_queue_cost,
            priority_aging_s=priority_aging_s,
            tenant_weights=tenant_weights,
            background=background,
        )
        self._recorder = Recorder()
        self._clock = clock
        self._state = STOPPED
        self._loop: asyncio.AbstractEventLoop | None = None
        self._runs: set[Any] = set()  # batches, or slots; the `owner` of each is the task that holds it
        self._deciding = self._again = False
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = 0.0
        self._ended: asyncio.Future[None] | None = None

    @property
    def is_running(self) -> bool:
        """True while records are let in."""
        return self._state == RUNNING

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The event loop on which it was started; before that, reading it raises a RuntimeError."""
        if self._loop is None:
            raise Closed(f"{type(self).__name__} is {self._state}")
        return self._loop

    def observe(self, limit: int = 65_536) -> Observations:
        """Keep an observation of each of the last `limit` records from now on, and return the place."""
        checks.whole("limit", limit, 1)
        self._recorder.observations = Observations(deque(maxlen=limit), deque(maxlen=limit))
        return self._recorder.observations

    def weigh(self, tenant: str, weight: float | None) -> None:
        """Set the weight of a tenant from now on; None: the weight in `tenant_weights`."""
        self._queue.tenants.weigh(tenant, weight)

    def set_tenant_weights(self, weights: Mapping[str, float]) -> None:
        """Change `tenant_weights`, also for waiting records; what tenants were served is not counted anew."""
        self._queue.tenants.set_weights(weights)

    def _common_stats(self, now: float) -> dict[str, Any]:
        """Return the fields of `Stats`, without those of running records."""
        queue = self._queue
        return self._recorder.common(now) | {
            "total_submitted": queue.entered,
            "queue_depth": queue.size,
            "queue_cost": queue.cost,
            "queue_classes": queue.classes(),
            "outside": queue.outside,
        }

    @abstractmethod
    def estimate_wait(
        self, cost: int, priority: int = 0, tenant: str | None = None, *, records: int = 1
    ) -> float:
        """Return the seconds that records submitted now, of this cost together, would wait for their start.

        Without a tenant they go behind their whole tier. Records in lower tiers don't count.
        """

    async def start(self) -> None:
        """Let records in; RuntimeError if it runs already, or is still stopping."""
        if self._state != STOPPED:
            raise RuntimeError(f"{type(self).__name__} is already {self._state}")
        self._loop = asyncio.get_running_loop()
        self._loop_runs, self._thread = self._loop.is_running, get_ident()
        self._context = contextvars.copy_context()
        self._state = RUNNING
        self._recorder.open(self._clock())

    async def stop(self, drain: bool = True, timeout: float | None = None) -> None:  # noqa: ASYNC109
        """Refuse new records, finish the accepted records, then stop. May be called twice, and again later.

        Args:
            drain: Let waiting records run first; False: they fail with `Closed`. Running records may finish.
            timeout: Seconds after which waiting records fail with `Closed`, and functions are cancelled; a
                result of a thread is dropped, and slots that callers hold are no longer waited for.

        Raises:
            RuntimeError: It is called from a task that it would wait for, or from another event loop.
        """
        checks.flag("drain", drain)
        if timeout is not None:
            checks.seconds("timeout", timeout)
        if self._state == STOPPED:
            return
        self._check_loop()
        if self._deciding or asyncio.current_task() in {run.owner for run in self._runs}:
            raise RuntimeError("stop() would wait for its own caller; call it from another task")
        self._state = STOPPING
        ended = self._ended = self._ended or self.loop.create_future()
        if not drain:
            self._refuse_all()
        self._decide()
        await asyncio.wait((ended,), timeout=timeout)
        if not ended.done():
            self._refuse_all()
            self._decide()
            await asyncio.sleep(0)  # a `submit` whose slot has just started makes its task now
            if self._ended is ended and (tasks := self._abort()):
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
        self._state = STOPPED

    def _check_open(self, records: int = 1) -> None:
        """Raise unless records may be submitted here and now."""
        if self._state != RUNNING:
            self._recorder.total_rejected += records
            raise Closed(f"{type(self).__name__} is {self._state}")
        self._check_loop()

    def _check_loop(self) -> None:
        # The thread's id is looked at first: asking for the running loop takes Python 3.11 a system call.
        if (get_ident() != self._thread or not self._loop_runs()) and _get_running_loop() is not self._loop:
            name = type(self).__name__
            raise RuntimeError(f"{name} belongs to another event loop; use it there")

    def _deadline(self, deadline: float | None, timeout: float | None, now: float, records: int = 1) -> float:
        """Return the deadline that a record was given, in either way."""
        if timeout is not None:
            if deadline is not None:
                raise ValueError("give either deadline, a time on the clock, or timeout, seconds from now")
            checks.seconds("timeout", timeout)
            deadline = now + timeout
        checks.instant("deadline", deadline)
        if deadline is None or deadline <= now:
            self._recorder.total_rejected += records
            raise Expired("the deadline passed before the record was submitted")
        return deadline

    def _enter(self, entry: EntryT, wait: bool) -> None:
        """Start an entry that was put into the queue, if it may; without space it waits, or is refused."""
        queue = self._queue
        self._decide()
        if entry.admitted or (wait and entry.waiting):
            return
        if not entry.waiting:
            # It was too late, or can never run.
            raise entry.exception() or AssertionError
        if (bound := queue.let_in(entry)) is None:
            # Space came, and another that came before it needs more.
            return
        queue.remove(entry)
        if self._end_wishes():
            self._decide()
        self._recorder.total_rejected += entry.records
        wait_s = self.estimate_wait(entry.cost, entry.priority, entry.tenant, records=entry.records)
        raise QueueFull(*bound, entry._place.retry_after(entry.priority, wait_s, self._clock()))

    async def _wait_for_space(self, entry: EntryT) -> None:
        """Wait until an entry that waits outside is admitted; raise the error of its refusal."""
        entry.space = self.loop.create_future()
        await entry.space
        if not entry.admitted:
            raise entry.exception() or AssertionError

    def _decide(self) -> None:
        """Decide what becomes of the entries, in this order."""
        if self._deciding:
            # Something that was started has ended before it gave way, or cancels others.
            self._again = True
            return
        if self._loop is None or self._loop.is_closed():
            # A coroutine that is collected with its loop gives its place back here; nothing can start there.
            return
        queue = self._queue
        self._deciding = self._again = True
        try:
            while self._again:
                self._again = False
                # 1. What comes too late ends.
                self._end_late()
                # 2. What may start, starts; more may have been found too late on the way.
                self._start_ready()
                self._end_late()
                # 3. What waits outside comes in where there is space now.
                queue.admit()
                # 4. Wishes for which nothing waits any more end; that may let others start.
                self._again = self._again or self._end_wishes()
        finally:
            self._deciding = False
        # 5. The next deadline, or another time at which records may start, brings us back.
        self._set_alarm()
        # 6. A stop ends when nothing is left.
        if self._ended is not None and not queue.total and not self._runs and not self._ended.done():
            self._ended.set_result(None)

    def _next_alarm(self) -> float | None:
        """Return the time by which a decision is due, whatever happens until then; None: there is none."""
        return self._queue.next_deadline()

    def _set_alarm(self) -> None:
        due = self._next_alarm()
        if due is not None and (self._alarm is None or due < self._alarm_at):
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = due
            self._alarm = self.loop.call_later(max(LEAST_DELAY_S, due - self._clock()), self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self._decide()

    def _end_late(self) -> None:
        for entry in self._queue.expire():
            outside = "the deadline passed before there was space in the queue"
            self._end(entry, Expired(LATE if entry.admitted else outside))

    def _refuse_all(self) -> None:
        """End all that has not started."""
        for entry in self._queue.clear():
            self._end(entry, Closed(f"{type(self).__name__} was stopped before the record could start"))

    def _end(self, entry: EntryT, error: BatcherError) -> None:
        """End an entry that has left the queue unserved, and tell its caller."""
        self._recorder.unserved(entry, late=isinstance(error, Expired))
        entry.fail(error)
        if not entry.admitted or isinstance(error, Closed):
            # Python reports errors that are not looked at. A caller in `submit` gets this one from there; of
            # those that a stop ends, few are looked at.
            entry.exception()

    def _withdraw(self, entry: EntryT) -> None:
        """Count an entry that was cancelled, and give its place back."""
        if entry.admitted:
            self._recorder.total_cancelled += entry.records
        if self._queue.remove(entry):
            self._decide()

    def _end_wishes(self) -> bool:
        """End the wishes for needs for which no record waits any more; return whether there were any."""
        return False

    @abstractmethod
    def _start_ready(self) -> None:
        """Start what may start."""

    @abstractmethod
    def _abort(self) -> list["asyncio.Task[Any]"]:
        """Give up running records; return the tasks that are still to end."""
