"""What reports at a steady pace, so that nothing is reported on the way of a request."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("ray.serve")

INTERVAL_S = 1.0


class Reporter:
    """Calls jobs once a second on the event loop. One that fails is logged once and called again.

    Args:
        jobs: What to call.
        interval_s: Seconds between two rounds.
    """

    def __init__(self, *jobs: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._jobs = jobs
        self._interval_s = interval_s
        self._failed: set[Callable[[], None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "Reporter":
        """Begin, on the running loop."""
        if self._jobs:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    def report(self) -> None:
        """Call every job now."""
        for job in self._jobs:
            try:
                job()
            except Exception:
                # What the service tells of itself must never end the service.
                if job not in self._failed:
                    self._failed.add(job)
                    logger.exception("telemetry fails; it is tried again, and this is said once")

    def stop(self) -> None:
        """Report for the last time."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
            self.report()

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            self.report()
