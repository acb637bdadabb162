"""Limit on concurrent calls, and the waits between retries."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]

RETRYABLE = {408, 425, 429, 500, 502, 503, 504}
"""Statuses after which another try may succeed."""


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

    def answered(self) -> None:
        """Note a call that was answered."""

    def refused(self, retry_after_s: float | None) -> None:
        """Note a call that was answered 429."""

    def observe(self, running: int, waiting: int) -> None:
        """Note the numbers of records in the batchers."""


class Auto:
    """A limit on concurrent calls that adapts, so that the batchers stay busy with a short queue.

    The aim is about as many waiting records as running ones, so that a record is at hand whenever one ends.
    With fewer waiting the limit grows by a quarter, with more than three times as many it shrinks by one. A
    429 halves it, at most once within the service's `Retry-After`.

    Args:
        first: Limit at the start.
        most: Highest limit.
        clock: Monotonic clock, in seconds.

    Attributes:
        limit: Most calls at once.
    """

    def __init__(self, first: int = 4, most: int = 256, clock: Clock = time.monotonic) -> None:
        self.limit = first
        self._most = most
        self._clock = clock
        self._answered = 0
        self._quiet_until = float("-inf")

    def answered(self) -> None:
        """Note a call that was answered."""
        self._answered += 1

    def refused(self, retry_after_s: float | None) -> None:
        """Note a call that was answered 429."""
        now = self._clock()
        if now >= self._quiet_until:
            self.limit = max(1, self.limit // 2)
            self._quiet_until = now + max(1.0, retry_after_s or 0.0)

    def observe(self, running: int, waiting: int) -> None:
        """Note the numbers of records in the batchers."""
        # Before the first answer nothing is known about the service's capacity.
        if self._clock() < self._quiet_until or not self._answered:
            return
        if waiting < max(running, 1):
            self.limit = min(self._most, self.limit + max(1, self.limit // 4))
        elif waiting > 3 * max(running, 1):
            self.limit = max(1, self.limit - 1)


Concurrency = Fixed | Auto
"""A limit on concurrent calls."""
