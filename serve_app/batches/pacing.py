"""Limit on concurrent calls, and the waits between retries."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from serve_app.batches.engine_load import EngineLoad

Clock = Callable[[], float]

RETRYABLE = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which another try may succeed."""

GROWING_S, STEADY_S = 0.25, 1.0
"""Seconds between two looks at the load of the engines, while a limit grows and otherwise."""

CAREFUL_S = 30.0
"""Seconds after a refusal in which free places say nothing."""

GROWTH = 4
"""Times by which a limit grows at once, at most."""

BINDING = 0.75
"""Share of a limit that is in use if the limit is what holds calls back; some have just ended."""


@dataclass(slots=True, frozen=True)
class Backoff:
    """Exponential backoff with jitter, so that callers don't retry in step.

    Attributes:
        first_s: Longest wait before the first retry, in seconds.
        most_s: Longest wait of all, in seconds.
    """

    first_s: float = 0.5
    most_s: float = 60.0
    _random: random.Random = field(default_factory=random.Random, repr=False, compare=False)

    def wait_s(self, failures: int, retry_after_s: float | None = None) -> float:
        """Return the seconds to wait before the next try.

        Args:
            failures: Number of failed tries, at least 1.
            retry_after_s: Seconds from the service's `Retry-After`; the wait is never shorter.
        """
        # The exponent is bounded because a large power would overflow.
        ceiling = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        wait = ceiling * self._random.uniform(0.5, 1.0)
        if retry_after_s is None:
            return wait
        # Jitter, since all callers with the same Retry-After would return at once.
        return max(wait, retry_after_s * self._random.uniform(1.0, 1.25))


class Fixed:
    """A constant limit on concurrent calls.

    Args:
        limit: Most calls at once.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.interval_s = STEADY_S

    def answered(self) -> None:
        """Note a call that was answered."""

    def refused(self, retry_after_s: float | None) -> None:
        """Note a call that was answered 429."""

    def observe(self, load: EngineLoad | None, calls: int) -> None:
        """Note the load of the engines, and the calls that they have."""


class Auto:
    """A limit on concurrent calls that adapts, so that the batchers stay busy with a short queue.

    The aim is about as many waiting records as running ones, so that a record is at hand whenever one ends.
    With fewer waiting the limit grows by a quarter; if the engines have more free places than that, by as
    many calls as fill these, but at most fourfold, so that each step is seen before the next. What fills a
    free place runs at once: it stands in no queue, and gives way to live traffic.
    With more than three times as many waiting the limit shrinks by one. A 429 halves it, at most once within
    the service's `Retry-After`, and growth is by a quarter for a while: there is a bound that isn't known.

    Args:
        first: Limit at the start, if `most` is no lower.
        most: Highest limit.
        records: Records of a call.
        clock: Monotonic clock, in seconds.

    Attributes:
        limit: Most calls at once.
        interval_s: Seconds until the next look at the engines is of use.
    """

    def __init__(
        self, first: int = 4, most: int = 256, *, records: int = 1, clock: Clock = time.monotonic
    ) -> None:
        self.limit = min(first, most)
        self.interval_s = GROWING_S
        self._most = most
        self._records = records
        self._clock = clock
        self._answered = False
        self._quiet_until = self._careful_until = float("-inf")

    def answered(self) -> None:
        """Note a call that was answered."""
        self._answered = True

    def refused(self, retry_after_s: float | None) -> None:
        """Note a call that was answered 429."""
        now = self._clock()
        if now >= self._quiet_until:
            self.limit = max(1, self.limit // 2)
            self._quiet_until = now + max(1.0, retry_after_s or 0.0)
            self._careful_until = self._quiet_until + CAREFUL_S

    def observe(self, load: EngineLoad | None, calls: int) -> None:
        """Note the load of the engines.

        Args:
            load: The load; None: it isn't known, so that refusals alone tell what the engines take.
            calls: Calls that they have from here.
        """
        self.interval_s = STEADY_S
        running, waiting, free = load or (calls * self._records, 0, None)
        now = self._clock()
        if now < self._quiet_until:
            return
        fills = now >= self._careful_until and (running > 0 or self._answered)
        if waiting > 3 * max(running, 1):
            self.limit = max(1, self.limit - 1)
        elif waiting < max(running, 1) and calls >= BINDING * self.limit:
            before = self.limit
            self.limit = min(self._most, before + self._step(free or 0 if fills else 0))
            if load is not None and fills and self.limit > before:
                self.interval_s = GROWING_S

    def _step(self, free: int) -> int:
        """Return by how much the limit grows, with so many free places."""
        # Before the first answer nothing is known about the capacity, but for free places beside what runs.
        step = max(1, self.limit // 4) if self._answered else 0
        return max(step, min((GROWTH - 1) * self.limit, -(-free // self._records)))


Concurrency = Fixed | Auto
"""A limit on concurrent calls."""
