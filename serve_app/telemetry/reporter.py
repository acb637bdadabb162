"""Periodic reporter: metrics and logs are written off the request path."""

import asyncio
import logging
from collections.abc import Callable

logger = logging.getLogger("ray.serve")

INTERVAL_S = 1.0
"""Seconds between two rounds."""


class Reporter:
    """Calls jobs periodically on the event loop. A job that fails is logged once and called again.

    Args:
        jobs: The jobs.
        interval_s: Seconds between two rounds.
    """

    def __init__(self, *jobs: Callable[[], None], interval_s: float = INTERVAL_S) -> None:
        self._jobs = jobs
        self._interval_s = interval_s
        self._failed: set[Callable[[], None]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> "Reporter":
        """Start, on the running loop."""
        if self._jobs:
            self._task = asyncio.get_running_loop().create_task(self._run())
        return self

    def report(self) -> None:
        """Call every job once."""
        for job in self._jobs:
            try:
                job()
            except Exception:
                # A failure of telemetry must not stop the service.
                if job not in self._failed:
                    self._failed.add(job)
                    logger.exception("telemetry fails; it is tried again, and this is logged once")

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
