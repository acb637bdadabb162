"""The decision whether a partial batch leaves now or waits for more records, by experience."""

import asyncio
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from batcher.admission import LEAST_DELAY_S
from batcher.queue import RequestQueue

WAIT_SHARE = 1 / 4  # how long a record waits for others, if at all, as a share of a batch's time
SMOOTHING = 1 / 4  # weight of the newest value in a moving average
QUIET_PASSES = 3  # passes of the event loop without a new record, after which nothing more is arriving


@dataclass(slots=True, eq=False)
class BatchDelay:
    """Holds a partial batch back while records are arriving, or while more records are worth waiting for.

    It learns how long a batch takes, and how many records follow a partial batch that could have waited.
    Waiting pays if it saves the following records more time in batches than it costs all records in waiting.
    Fewer records than `_least` wait until the timeout in any case.
    """

    _queue: RequestQueue[Any]
    _least: int
    _timeout_s: float
    _clock: Callable[[], float]
    _leave: Callable[[], None]
    batch_s: float | None = None  # mean seconds that a batch takes
    over: bool = False  # whether what waits is to leave; `_leave` is called when it has become so
    _followers: float = 0.0
    # The next look at the batch, and when nothing seemed to be arriving any more.
    _handle: asyncio.Handle | None = None
    _complete_at: float | None = None

    def hold(self, loop: asyncio.AbstractEventLoop) -> None:
        """Hold waiting records back, and look again when they have just become enough."""
        waits = hasattr(self._handle, "when")  # it is a timer, of whatever kind of event loop
        if self._handle is None or (waits and self._queue.total == self._least):
            self.release()
            leave_by = min(entry.submitted_at for entry in self._queue) + self._timeout_s
            self._handle = loop.call_soon(self._look, loop, leave_by)

    def release(self) -> float | None:
        """Hold nothing back any more; return since when the batch could have waited for more records."""
        if self._handle is not None:
            self._handle.cancel()
        complete_at = self._complete_at
        self._handle, self._complete_at, self.over = None, None, False
        return complete_at

    def learn(self, batch_s: float, complete_at: float | None, batch: list[Any]) -> None:
        """Note the time of a batch, and since when it could have waited for more records."""
        before_s = batch_s if self.batch_s is None else self.batch_s
        self.batch_s = before_s + SMOOTHING * (batch_s - before_s)
        if complete_at is not None:
            until = complete_at + self._wait_s()
            followers = sum(complete_at < entry.submitted_at <= until for entry in (*batch, *self._queue))
            self._followers += SMOOTHING * (followers - self._followers)

    def _look(self, loop: asyncio.AbstractEventLoop, leave_by: float, seen: int = -1, quiet: int = 0) -> None:
        """Decide on the batch; `seen` records had entered by the last look, after `quiet` idle passes."""
        queue, now, present = self._queue, self._clock(), self._queue.total
        quiet = quiet + 1 if queue.entered == seen else 0
        again = functools.partial(self._look, loop, leave_by, queue.entered, quiet)
        if present and quiet < QUIET_PASSES and now < leave_by:
            self._handle = loop.call_soon(again)
            return
        few = present < self._least
        wait_s = self._timeout_s if few else self._wait_s()
        left_s: float = min((entry.submitted_at for entry in queue), default=-math.inf) + wait_s - now
        if not few and left_s > 0 and self._complete_at is None:
            self._complete_at = now
        pays = few or self._followers * (self.batch_s or 0.0) > (present + self._followers) * wait_s
        if pays and left_s > 0:
            self._handle = loop.call_later(max(LEAST_DELAY_S, left_s), again)
            return
        self._handle, self.over = None, True
        self._leave()

    def _wait_s(self) -> float:
        return self._timeout_s if self.batch_s is None else min(self._timeout_s, WAIT_SHARE * self.batch_s)
