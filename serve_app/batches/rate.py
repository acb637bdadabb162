"""Rate at which rows get their results, and the work that the engines have room for."""

import time
from collections import deque

from serve_app.batches.pacing import Clock

WINDOW_S = 60.0
"""Seconds over which the rate is measured."""

LEAST_S = 1.0
"""Seconds after which a first rate is known."""

LONGEST_S = 120.0
"""Seconds between two looks beyond which nothing is measured: the machine slept, or its clock was set."""


class Rate:
    """Rows per second, over the last minute in which there were any.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        total: Rows so far.
    """

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self.total = 0
        self._clock = clock
        self._marks: deque[tuple[float, int]] = deque()
        self._last = 0.0

    def add(self, rows: int) -> None:
        """Count rows."""
        now = self._clock()
        self._drop(now)
        self.total += rows
        if not self._marks or now - self._marks[-1][0] >= LEAST_S:
            self._marks.append((now, self.total))
        self._measure(now)

    @property
    def per_s(self) -> float:
        """The rate; 0: it is not known yet."""
        now = self._clock()
        self._drop(now)
        self._measure(now)
        return self._last

    def _drop(self, now: float) -> None:
        while self._marks and now - self._marks[0][0] > WINDOW_S:
            self._marks.popleft()

    def _measure(self, now: float) -> None:
        if not self._marks:
            return
        since, before = self._marks[0]
        if now - since >= LEAST_S and self.total > before:
            self._last = (self.total - before) / (now - since)


class Meter:
    """Measures the work that engines do for batches while rows wait.

    Without rows that wait, the rate says how little there was to do. When rows begin to wait, the first of
    them haven't ended yet: measurement begins once as many have ended as were in flight.

    Args:
        clock: Clock, in seconds.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._last = clock()
        self._rows = 0
        self._work = 0.0
        self._settling: int | None = None

    def add(self, rows: int, work: float) -> None:
        """Count rows that have ended."""
        self._rows += rows
        self._work += work

    def look(self, waiting: bool, in_flight: int) -> tuple[float, float]:
        """Return the work that was measured since the last look, and its seconds; 0, 0: none was.

        Args:
            waiting: Whether rows wait because the engines are full.
            in_flight: Rows in flight.
        """
        now = self._clock()
        since_s = now - self._last
        measured = 0.0, 0.0
        if not waiting:
            self._settling = None
        elif self._settling is None:
            self._settling = in_flight
        elif self._settling > 0:
            self._settling -= self._rows
        elif since_s == 0:
            return measured
        elif 0 < since_s <= LONGEST_S:
            measured = self._work, since_s
        self._rows, self._work, self._last = 0, 0.0, now
        return measured
