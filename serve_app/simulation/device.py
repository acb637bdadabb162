"""A simulated device: a timeline of steps, one after the other."""

import time
from collections.abc import Callable

from serve_app.simulation.profiles import Profile, Work


class Device:
    """Runs steps in the order in which they are submitted; waiting for one takes no CPU.

    Args:
        profile: Its times.
        clock: Returns the time in seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        profile: Profile,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.profile = profile
        self._clock = clock
        self._sleep = sleep
        self._free_at = clock()
        self._pinned = False

    def submit(self, work: Work) -> float:
        """Add a step, which starts when all earlier steps have ended; return when it ends, on the clock."""
        self._free_at = max(self._clock(), self._free_at) + self.profile.step.seconds(work)
        return self._free_at

    def wait(self, until: float) -> None:
        """Wait until a time on the clock."""
        if (left := until - self._clock()) > 0:
            self._sleep(left)

    def load(self) -> None:
        """Take the time to load the weights."""
        self._sleep(self.profile.load_s)

    def fall_asleep(self) -> None:
        """Take the time to move the weights to the host."""
        self._sleep(self.profile.sleep_s if self._pinned else self.profile.pin_s + self.profile.sleep_s)
        self._pinned = True

    def wake_up(self) -> None:
        """Take the time to move the weights back."""
        self._sleep(self.profile.wake_s)
