"""Detects an engine that has work and makes no progress."""

import time
from collections.abc import Callable

MOST_INTERVALS = 2
"""Intervals that a late look counts as, at most: while this process didn't run either (it was busy, or the
machine slept), the engine's progress is unknown."""


class Watchdog:
    """Judges an engine by its progress: a process that hangs is alive too.

    An idle engine makes no progress and is fine. `timeout_s` has to be above the longest step, compilation
    included.

    Args:
        timeout_s: Seconds that an engine with work may go without progress.
        interval_s: Seconds between two looks at it.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, timeout_s: float, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._most = MOST_INTERVALS * interval_s
        self._clock = clock
        self._looked_at = clock()
        self._steps = -1
        self._silent_s = 0.0

    def look(self, *, busy: bool, steps: int) -> bool:
        """Return whether the engine hangs.

        Args:
            busy: Whether the engine has work.
            steps: Count of the engine's steps.
        """
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, self._most), now
        if busy and steps == self._steps:
            self._silent_s += passed
        else:
            self._silent_s = 0.0
        self._steps = steps
        return self._silent_s >= self._timeout_s
