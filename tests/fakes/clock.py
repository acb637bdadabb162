"""A clock that a test moves."""


class Clock:
    """A clock that moves by hand, and by its own `sleep`.

    Args:
        now: The first time, in seconds.

    Attributes:
        now: The time, in seconds.
    """

    def __init__(self, now: float = 0.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        """Move the time."""
        self.now += seconds
