"""Pacing of rows: limits that adapt to the load of the engines, and measured rates."""

import time
from collections import deque
from collections.abc import Callable, Iterable
from typing import NamedTuple

from batcher import BatchStats, ContinuousStats
from serve_app.stats import ReplicaStats


class EngineLoad(NamedTuple):
    """Records in the batchers of engines.

    Attributes:
        running: Running records.
        waiting: Waiting records.
        free: Further records that would start at once; None: unknown.
    """

    running: int
    waiting: int
    free: int | None = None


def engine_load(replicas: Iterable[ReplicaStats]) -> EngineLoad | None:
    """Return the total load of replicas; None: no replica reports its load."""
    batchers = [replica.batcher for replica in replicas if replica.batcher is not None]
    if not batchers:
        return None
    free = [_free(batcher) for batcher in batchers]
    known = [number for number in free if number is not None]
    return EngineLoad(
        sum(batcher.running for batcher in batchers),
        sum(batcher.queue_depth for batcher in batchers),
        sum(known) if len(known) == len(free) else None,
    )


def _free(batcher: ContinuousStats | BatchStats) -> int | None:
    """Return the number of records, like the running records, that a replica would start at once."""
    if not isinstance(batcher, ContinuousStats) or batcher.max_running is None:
        return None
    free = batcher.max_running - batcher.running
    if batcher.running_cost:
        # Records reserve tokens too: on average as many as the running records.
        left = batcher.capacity - batcher.running_cost
        free = min(free, left * batcher.running // batcher.running_cost)
    return max(0, free - batcher.queue_depth)


Clock = Callable[[], float]

GROWING_S, STEADY_S = 0.25, 1.0
"""Seconds between two looks at the load of the engines: while a limit grows, and otherwise."""

CAREFUL_S = 30.0
"""Seconds after a refusal in which free places are ignored."""

GROWTH = 4
"""Largest factor by which a limit grows at once."""

BINDING = 0.75
"""Share of a limit in use from which the limit counts as binding: some calls have just ended."""


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
        """Note the load of the engines, and the calls in flight."""


class Auto:
    """A limit on concurrent calls that adapts, so that the batchers stay busy with a short queue.

    The aim is about as many waiting as running records, so that a record is ready whenever another record
    ends. With fewer waiting records, a limit that is in use grows by a quarter, or by enough calls to fill
    the free places of the engines. The limit grows at most fourfold, so that each step is observed before
    the next step. A record in a free place runs at once, and gives way to live traffic. With more than three
    times as many waiting as running records the limit shrinks by one.

    A 429 halves the limit, at most once within the service's `Retry-After`. For a while after a 429 the limit
    grows by a quarter at most, since the engines have an unknown bound.

    Args:
        first: Limit at the start, if `most` isn't lower.
        most: Highest limit.
        clock: Monotonic clock, in seconds.

    Attributes:
        limit: Most calls at once.
        interval_s: Seconds to wait until the next look at the engines.
    """

    def __init__(self, first: int = 4, most: int = 256, *, clock: Clock = time.monotonic) -> None:
        self.limit = min(first, most)
        self.interval_s = GROWING_S
        self._most = most
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
            load: The load; None: unknown, so that only refusals bound the limit.
            calls: Calls in flight from here.
        """
        self.interval_s = STEADY_S
        running, waiting, free = load or (calls, 0, None)
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
        """Return the growth of the limit for a number of free places."""
        # Before the first answer, only free places beside running records show any capacity.
        step = max(1, self.limit // 4) if self._answered else 0
        return max(step, min((GROWTH - 1) * self.limit, free))


Concurrency = Fixed | Auto
"""A limit on concurrent calls."""


WINDOW_S = 60.0
"""Seconds over which the rate is measured."""

LEAST_S = 1.0
"""Seconds after which a first rate is known."""


class Rate:
    """Rows per second, over the last minute that had rows.

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
        """The rate; 0: not known yet."""
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
