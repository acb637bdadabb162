"""Calendar windows in UTC, and a clock that never goes back."""

from calendar import monthrange
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Literal, NamedTuple

Span = Literal["minute", "day", "month"]

MINUTE_S = 60
DAY_S = 86_400

STEP_S = 1.0
"""Maximum seconds of a jump ahead of the wall clock that is followed at once, as an ordinary correction."""

SETTLED_S = 60.0
"""Seconds after which a jump ahead counts as the right time. A jump that ends sooner changes nothing."""


class CalendarWindow(NamedTuple):
    """One window: a minute, a day or a month of the calendar.

    Attributes:
        span: Its length.
        starts_at: Its first second, since the epoch.
        ends_at: The first second after it.
    """

    span: Span
    starts_at: int
    ends_at: int


def window_at(span: Span, at: float) -> CalendarWindow:
    """Return the window that contains a time, in seconds since the epoch."""
    if span != "month":
        length = MINUTE_S if span == "minute" else DAY_S
        starts_at = int(at // length) * length
        return CalendarWindow(span, starts_at, starts_at + length)
    first = datetime.fromtimestamp(at, UTC).replace(day=1, hour=0, minute=0, second=0, microsecond=0)
    starts_at = int(first.timestamp())
    return CalendarWindow(span, starts_at, starts_at + monthrange(first.year, first.month)[1] * DAY_S)


class WindowClock:
    """Seconds since the epoch, for windows: they never go back, and brief jumps of the wall clock have no
    effect.

    The time follows the wall clock. If the wall clock jumps ahead, the time runs by the monotonic clock until
    the jump has lasted for `SETTLED_S`. If the wall clock is behind, the time runs at half speed until both
    agree. So the time never stands still, and no window comes twice.

    Args:
        wall: Seconds since the epoch.
        monotonic: Seconds of a clock that never jumps.
        not_before: The last time that an earlier process has seen.
    """

    def __init__(
        self, wall: Callable[[], float], monotonic: Callable[[], float], not_before: float = 0.0
    ) -> None:
        self._wall = wall
        self._monotonic = monotonic
        self._at = monotonic()
        self._now = max(wall(), not_before)
        self._ahead_since: float | None = None

    def now(self) -> float:
        """Return the time."""
        at, wall = self._monotonic(), self._wall()
        elapsed = max(0.0, at - self._at)
        self._at = at
        due = self._now + elapsed
        if wall - due <= STEP_S:
            self._ahead_since = None
            self._now = max(wall, self._now + elapsed / 2)
            return self._now
        self._now = due
        if self._ahead_since is None:
            self._ahead_since = at
        elif at - self._ahead_since >= SETTLED_S:
            self._ahead_since = None
            self._now = wall
        return self._now
