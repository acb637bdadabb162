"""Rate at which rows get their results."""

import time
from collections import deque

from serve_app.batches.pacing import Clock

WINDOW_S = 60.0
"""Seconds over which the rate is measured."""

LEAST_S = 1.0
"""Seconds after which a first rate is known."""


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
