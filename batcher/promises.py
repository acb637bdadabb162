"""When those who are refused are told to come back: one after the other, not all at once."""

LATEST_S = 60.0
"""Seconds after which anybody may try again: who was told to come back before may have given up."""

MAX_CLASSES = 64


class Promises:
    """Spreads the returns of those who were refused over the time in which they can be served.

    Without it everybody who is refused within a burst is told the same wait, and comes back in a burst.
    """

    __slots__ = ("_until",)

    def __init__(self) -> None:
        self._until: dict[int, float] = {}

    def after(self, now: float, priority: int, wait_s: float, each_s: float) -> float:
        """Return in how many seconds to come back, behind all of the same class who were told so before.

        Args:
            now: The time.
            priority: The class.
            wait_s: Seconds until what waits has been served.
            each_s: Seconds that each of them takes.
        """
        at = min(max(now + wait_s, self._until.get(priority, 0.0)), now + max(wait_s, LATEST_S))
        if priority not in self._until and len(self._until) >= MAX_CLASSES:
            self._until.clear()
        self._until[priority] = at + each_s
        return at - now
