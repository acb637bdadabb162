"""How many calls are under way at once, and how long to wait before one is sent again."""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass, field

Clock = Callable[[], float]


@dataclass(slots=True, frozen=True)
class Backoff:
    """Waits that double, with jitter, so that many callers don't come back together.

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
            failures: Tries that have failed, at least 1.
            retry_after_s: What the service asks for; the wait is never shorter.
        """
        # Past 2**60 the power says nothing more, and would overflow.
        ceiling = min(self.most_s, self.first_s * 2.0 ** min(failures - 1, 60))
        wait = ceiling * self._random.uniform(0.5, 1.0)
        if retry_after_s is None:
            return wait
        # Who waits for the same second would come in the same one.
        return max(wait, retry_after_s * self._random.uniform(1.0, 1.25))


class Fixed:
    """A constant number of calls at once.

    Args:
        limit: The number.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit

    def answered(self) -> None:
        """Take in that a call was answered."""

    def refused(self, retry_after_s: float | None) -> None:
        """Take in that a call was answered 429."""

    def saw(self, running: int, waiting: int) -> None:
        """Take in what the batchers hold."""


class Auto:
    """As many calls at once as keep the batchers busy, and no more.

    Enough is when about as many records wait in the batchers as run: the next ones are there when a place
    gets free. With fewer the limit grows by a quarter, with three times as many it shrinks by one, and a 429
    halves it, once in the time that the service asks us to stay away.

    Args:
        first: Calls at once in the beginning.
        most: Calls at once at most.
        clock: In seconds.
    """

    def __init__(self, first: int = 4, most: int = 256, clock: Clock = time.monotonic) -> None:
        self.limit = first
        self._most = most
        self._clock = clock
        self._answered = 0
        self._quiet_until = float("-inf")

    def answered(self) -> None:
        """Take in that a call was answered."""
        self._answered += 1

    def refused(self, retry_after_s: float | None) -> None:
        """Take in that a call was answered 429."""
        now = self._clock()
        if now >= self._quiet_until:
            self.limit = max(1, self.limit // 2)
            self._quiet_until = now + max(1.0, retry_after_s or 0.0)

    def saw(self, running: int, waiting: int) -> None:
        """Take in what the batchers hold."""
        # Before an answer has come, nothing is known of what the service can do.
        if self._clock() < self._quiet_until or not self._answered:
            return
        if waiting < max(running, 1):
            self.limit = min(self._most, self.limit + max(1, self.limit // 4))
        elif waiting > 3 * max(running, 1):
            self.limit = max(1, self.limit - 1)


Concurrency = Fixed | Auto
