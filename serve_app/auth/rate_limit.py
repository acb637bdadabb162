"""Rate and concurrency limit of an API key."""

from collections import deque
from collections.abc import Callable

from limits import RateLimitItemPerMinute
from limits.storage import MovingWindowSupport, Storage
from limits.strategies import MovingWindowRateLimiter

from serve_app.api.errors import RequestError

UNKNOWN_S = 1.0
"""Assumed seconds per request before the first one has ended."""

LATEST = 0.1
"""Weight of the latest request in the moving mean of durations."""


class RateLimit:
    """Requests per minute and requests in flight of one API key, in one process.

    The requests that begin within any 60 s are bounded, wherever these 60 s begin.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        max_concurrency: Most requests in flight; None: no limit.
        in_flight: Requests in flight.
    """

    __slots__ = ("_clock", "_item", "_mean_s", "_window", "in_flight", "max_concurrency")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean_s = UNKNOWN_S
        self._item: RateLimitItemPerMinute | None = None
        self._window: MovingWindowRateLimiter | None = None
        self.max_concurrency: int | None = None
        self.in_flight = 0

    @property
    def rate_per_minute(self) -> int | None:
        """Requests per minute; None: no limit. A change counts the requests of the last minute."""
        return None if self._item is None else self._item.amount

    @rate_per_minute.setter
    def rate_per_minute(self, rate: int | None) -> None:
        self._item = None if rate is None else RateLimitItemPerMinute(rate)
        if rate is None:
            self._window = None
        elif self._window is None:
            self._window = MovingWindowRateLimiter(_Requests(self._clock))

    def enter(self) -> float:
        """Count a request that begins; return the time, which `leave` needs.

        Raises:
            RequestError: 429, with the seconds after which another try is likely to succeed.
        """
        now = self._clock()
        if (most := self.max_concurrency) is not None and self.in_flight >= most:
            # With `most` in flight, one ends every mean duration / most seconds.
            raise _refusal(f"has {most} requests in flight, as many as it may", self._mean_s / most)
        # Two names, since a reload in another thread changes the attributes.
        item, window = self._item, self._window
        if item is not None and window is not None and not window.hit(item):
            seconds = window.get_window_stats(item).reset_time - now
            raise _refusal(f"may make {item.amount} requests a minute", max(0.0, seconds))
        self.in_flight += 1
        return now

    def leave(self, entered: float) -> None:
        """Count a request that ends; `entered` is what `enter` returned."""
        self.in_flight -= 1
        self._mean_s += LATEST * (self._clock() - entered - self._mean_s)


class _Requests(MovingWindowSupport, Storage):
    """The times of one key's latest requests, for a moving window.

    The storage of the library reads the time of day, and one that is set back by an hour would refuse a busy
    key for that hour; and it starts a thread to forget old times. Here names of limits don't count, so that
    requests outlast a change of the limit.

    Args:
        clock: Monotonic clock, in seconds.
    """

    STORAGE_SCHEME = None

    def __init__(self, clock: Callable[[], float]) -> None:
        super().__init__()
        self._clock = clock
        self._times: deque[float] = deque()

    def acquire_entry(self, key: str, limit: int, expiry: int, amount: int = 1) -> bool:
        """Count `amount` requests if at most `limit` fall within `expiry` seconds then."""
        now = self._clock()
        times = self._times
        while times and times[0] <= now - expiry:
            times.popleft()
        if len(times) + amount > limit:
            return False
        times.extend([now] * amount)
        return True

    def get_moving_window(self, key: str, limit: int, expiry: int) -> tuple[float, int]:
        """Return the time of the request that has to leave the window before another fits, and the number."""
        count = len(self._times)
        return (self._times[max(0, count - limit)] if count else self._clock()), count

    def clear(self, key: str) -> None:
        """Forget all requests."""
        self._times.clear()

    def reset(self) -> int | None:
        """Forget all requests; return their number."""
        count = len(self._times)
        self._times.clear()
        return count

    def check(self) -> bool:
        """Return whether the storage works."""
        return True

    @property
    def base_exceptions(self) -> type[Exception]:
        """Errors of the storage itself: there are none."""
        return ValueError

    def incr(self, key: str, expiry: int, amount: int = 1) -> int:
        """Not for this storage: fixed windows need it."""
        raise NotImplementedError

    def get(self, key: str) -> int:
        """Not for this storage: fixed windows need it."""
        raise NotImplementedError

    def get_expiry(self, key: str) -> float:
        """Not for this storage: fixed windows need it."""
        raise NotImplementedError


def _refusal(why: str, seconds: float) -> RequestError:
    message = f"This API key {why}. Try again in {seconds:.1f} s."
    return RequestError(429, "rate_limit_error", message, retry_after_s=seconds)
