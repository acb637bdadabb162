"""Rate and concurrency limit of an API key."""

from collections import deque
from collections.abc import Callable

from serve_app.api.errors import RequestError

UNKNOWN_S = 1.0
"""Assumed seconds per request before the first one has ended."""

WINDOW_S = 60.0

LATEST = 0.1
"""Weight of the latest request in the moving mean of durations."""


class RateLimit:
    """Requests per minute and requests in flight of one API key, in one process.

    The requests that begin within any 60 s are bounded, wherever these 60 s begin.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        rate_per_minute: Requests per minute; None: no limit. A change counts the requests of the last minute.
        max_concurrency: Most requests in flight; None: no limit.
        in_flight: Requests in flight.
    """

    __slots__ = ("_clock", "_mean_s", "_times", "in_flight", "max_concurrency", "rate_per_minute")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._mean_s = UNKNOWN_S
        # When the requests of the last minute began.
        self._times: deque[float] = deque()
        self.rate_per_minute: int | None = None
        self.max_concurrency: int | None = None
        self.in_flight = 0

    def enter(self) -> float:
        """Count a request that begins; return the time, which `leave` needs.

        Raises:
            RequestError: 429, with the seconds after which another try is likely to succeed.
        """
        now = self._clock()
        if (most := self.max_concurrency) is not None and self.in_flight >= most:
            # With `most` in flight, one ends every mean duration / most seconds.
            raise _refusal(f"has {most} requests in flight, as many as it may", self._mean_s / most)
        # Read once, since a reload in another thread changes the attribute.
        if (rate := self.rate_per_minute) is not None:
            times = self._times
            while times and times[0] <= now - WINDOW_S:
                times.popleft()
            if len(times) >= rate:
                seconds = times[len(times) - rate] + WINDOW_S - now
                raise _refusal(f"may make {rate} requests a minute", max(0.0, seconds))
            times.append(now)
        self.in_flight += 1
        return now

    def leave(self, entered: float) -> None:
        """Count a request that ends; `entered` is what `enter` returned."""
        self.in_flight -= 1
        self._mean_s += LATEST * (self._clock() - entered - self._mean_s)


def _refusal(why: str, seconds: float) -> RequestError:
    message = f"This API key {why}. Try again in {seconds:.1f} s."
    return RequestError(429, "rate_limit_error", message, retry_after_s=seconds)
