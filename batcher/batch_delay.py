"""Whether a partial batch should wait for more records, as experience tells."""

from collections.abc import Iterable

WAIT_SHARE = 1 / 4
"""How long a record waits for others, if at all, as a share of the time that a batch takes."""

SMOOTHING = 1 / 4
"""Weight of the newest value in a moving average."""


class BatchDelay:
    """Learns how long a batch takes, and how many records follow a partial one that could have waited.

    Waiting pays if the batches' time that it saves to those that follow is more than the wait that it
    costs those that are there, and them.

    Args:
        timeout_s: Seconds that a record waits at most.

    Attributes:
        batch_s: Mean seconds that a batch takes, None before the first.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._followers = 0.0
        self.batch_s: float | None = None

    @property
    def wait_s(self) -> float:
        """Seconds that a record waits for others where that pays."""
        return self._timeout_s if self.batch_s is None else min(self._timeout_s, WAIT_SHARE * self.batch_s)

    def pays(self, present: int) -> bool:
        """Return whether to wait with `present` records there."""
        if self.batch_s is None:
            return False
        return self._followers * self.batch_s > (present + self._followers) * self.wait_s

    def learn(self, batch_s: float, complete_at: float | None, arrivals: Iterable[float]) -> None:
        """Take in what a batch took, since when it could have waited, and when records were submitted."""
        self.batch_s = batch_s if self.batch_s is None else _moved(self.batch_s, batch_s)
        if complete_at is not None:
            until = complete_at + self.wait_s
            followers = sum(complete_at < arrival <= until for arrival in arrivals)
            self._followers = _moved(self._followers, followers)


def _moved(mean: float, value: float) -> float:
    return mean + SMOOTHING * (value - mean)
