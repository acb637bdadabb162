"""Rate and concurrency limit of an API key."""

from collections.abc import Callable

from serve_app.api.errors import RequestError

UNKNOWN_S = 1.0
"""Assumed seconds per request before the first one has ended."""

LATEST = 0.1
"""Weight of the latest request in the moving mean of durations."""


class RateLimit:
    """Token bucket and number of requests in flight of one API key, in one process.

    The bucket holds a minute's requests and is refilled evenly.

    Args:
        clock: Monotonic clock, in seconds.

    Attributes:
        rate_per_minute: Requests per minute; None: no limit.
        max_concurrency: Most requests in flight; None: no limit.
        in_flight: Requests in flight.
    """

    __slots__ = ("_at", "_clock", "_level", "_mean_s", "in_flight", "max_concurrency", "rate_per_minute")

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._level = float("inf")
        self._at = clock()
        self._mean_s = UNKNOWN_S
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
        if (rate := self.rate_per_minute) is not None:
            level = min(float(rate), self._level + (now - self._at) * rate / 60)
            self._at = now
            if level < 1:
                self._level = level
                raise _refusal(f"may make {rate} requests a minute", (1 - level) * 60 / rate)
            self._level = level - 1
        self.in_flight += 1
        return now

    def leave(self, entered: float) -> None:
        """Count a request that ends; `entered` is what `enter` returned."""
        self.in_flight -= 1
        self._mean_s += LATEST * (self._clock() - entered - self._mean_s)


def _refusal(why: str, seconds: float) -> RequestError:
    message = f"This API key {why}. Try again in {seconds:.1f} s."
    return RequestError(429, "rate_limit_error", message, retry_after_s=seconds)
