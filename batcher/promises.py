"""When those who are refused are told to come back: one after the other, not all at once."""

LATEST_S = 60.0
"""Seconds after which anybody may try again: who was told to come back before may have given up."""

RETURNS_SHARE = 0.5
"""Share of the service that those who come back get; the rest is for those who come for the first time."""

MAX_CLASSES = 64


class Promises:
    """Spreads the returns of those who were refused over the time in which they can be served.

    Without it everybody who is refused within a burst is told the same wait, and comes back in a burst.
    """

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def after(self, now: float, priority: int, wait_s: float, each_s: float) -> float:
        """Return in how many seconds to come back, behind all of this class and those above who were told.

        Args:
            now: The time.
            priority: The class.
            wait_s: Seconds until what waits has been served.
            each_s: Seconds that each of them takes.
        """
        until = self._until
        if priority not in until:
            if len(until) >= MAX_CLASSES:
                until.clear()
            until[priority] = max((at for above, at in until.items() if above < priority), default=now)
        at = min(max(now + wait_s, until[priority]), now + max(wait_s, LATEST_S))
        until[priority] = at
        for other in until:
            if other >= priority:
                until[other] = max(until[other], now) + each_s / RETURNS_SHARE
        return at - now
