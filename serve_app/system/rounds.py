"""Rounds of a thread or task that repeats its work, such as the reports of telemetry."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

logger = logging.getLogger("ray.serve")

INTERVAL_S = 1.0
"""Seconds between two rounds of a `Reporter`."""

SILENT_S = 60.0
"""Seconds without a successful round after which the work counts as dead."""


class Rounds:
    """Repeated work whose failures are logged and can't stay unnoticed.

    The first failed round after a success is logged with its stack, and the work continues. A thread that has
    died, hangs, or fails each time has no successful round; a health check detects this with `check`.

    Args:
        name: Name of the work, for messages.
        silent_s: Seconds without a successful round after which `check` raises.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self, name: str, silent_s: float = SILENT_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._name = name
        self._silent_s = silent_s
        self._clock = clock
        self._failing = False
        self._succeeded_at = clock()

    @contextmanager
    def round(self) -> Iterator[None]:
        """Return the context of one round; it logs and suppresses exceptions."""
        try:
            yield
        except Exception:
            if not self._failing:
                logger.exception("%s failed; it is tried again, and this is logged once", self._name)
            self._failing = True
        else:
            if self._failing:
                logger.info("%s works again", self._name)
            self._failing = False
            self._succeeded_at = self._clock()

    def check(self) -> None:
        """Raise if no round has succeeded for too long."""
        silent_s = self._clock() - self._succeeded_at
        if silent_s > self._silent_s:
            raise RuntimeError(f"{self._name} has not succeeded for {silent_s:.0f} s")


class Reporter:
    """Reports periodically on the event loop, off the path of requests; each report has rounds of its own.

    Args:
        reports: The reports.
        interval_s: Seconds between two rounds.
    """

    def __init__(self, *reports: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._reports = [(report, Rounds("a report of telemetry")) for report in reports]
        self._interval_s = interval_s
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "Reporter":
        """Start, on the running loop."""
        if self._reports:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    def report(self) -> None:
        """Make every report once."""
        for report, rounds in self._reports:
            with rounds.round():
                report()

    def stop(self) -> None:
        """Report once more, and stop. A second call does nothing."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self.report()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.report()
