"""Finds an engine that has work and makes no progress."""

import time
from collections.abc import Callable

MOST_LOOKS = 2
"""A look that comes late counts as so many intervals at most: while this process doesn't run either (it is
busy, or the machine sleeps), nothing can be said of the engine."""


class Watchdog:
    """Judges an engine by its progress, of which being alive is no proof.

    An idle engine makes none and is fine. So is a step that takes long, as long as it takes less than
    `timeout_s`: that has to be above the longest one, compilation and all.

    Args:
        timeout_s: Seconds that an engine with work may go without progress.
        interval_s: Seconds between two looks at it.
        clock: Returns the time in seconds.
    """

    def __init__(
        self, timeout_s: float, interval_s: float, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._timeout_s = timeout_s
        self._most = MOST_LOOKS * interval_s
        self._clock = clock
        self._looked_at = clock()
        self._steps = -1
        self._silent_s = 0.0

    def look(self, *, busy: bool, steps: int) -> bool:
        """Return whether the engine hangs.

        Args:
            busy: It has work.
            steps: Counts what has come out of it.
        """
        now = self._clock()
        passed, self._looked_at = min(now - self._looked_at, self._most), now
        if busy and steps == self._steps:
            self._silent_s += passed
        else:
            self._silent_s = 0.0
        self._steps = steps
        return self._silent_s >= self._timeout_s
