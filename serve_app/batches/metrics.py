"""Metrics of the batches, from their statistics."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from serve_app.api.protocol import JSON
from serve_app.batches.errors import DatabaseError
from serve_app.telemetry import catalogue
from serve_app.telemetry.faults import FaultCount
from serve_app.telemetry.meters import Meters

logger = logging.getLogger("ray.serve")

INTERVAL_S = 2.0
"""Seconds between two reports."""


class BatchesMetrics:
    """Records the statistics as metrics, periodically.

    Args:
        stats: Returns them; see `BatchService.stats`.
        meters: Instruments of `catalogue.BATCHES`; None: Ray's.
    """

    def __init__(self, stats: Callable[[], Awaitable[JSON]], meters: Meters | None = None) -> None:
        self._stats = stats
        self._meters = meters or Meters(catalogue.BATCHES)
        self._faults = FaultCount()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Report no more."""
        self._faults.stop()
        if self._task is not None:
            self._task.cancel()

    async def report(self) -> None:
        """Record the statistics once."""
        self._faults.report(self._meters)
        stats = await self._stats()
        record, count = self._meters.record, self._meters.count
        for state, number in stats["batches"].items():
            record(catalogue.BATCHES_OPEN, number, state)
        for state in ("waiting", "in_flight"):
            record(catalogue.BATCHES_ROWS, stats["rows"][state], state)
        for outcome in ("completed", "failed"):
            count(catalogue.BATCHES_ROWS_ENDED, stats["rows"][outcome], outcome)
        record(catalogue.BATCHES_OLDEST, stats["oldest_s"])
        record(catalogue.BATCHES_LEFT, stats["eta_s"] or 0.0)
        record(catalogue.BATCHES_LATE, stats["late"])
        record(catalogue.BATCHES_BYTES, stats["bytes"])

    async def _run(self) -> None:
        while True:
            try:
                await self.report()
            except (OSError, DatabaseError) as error:
                logger.warning("batches: no metrics: %r", error)
            except Exception:
                # A failure of telemetry must not stop the batches.
                logger.exception("batches: no metrics")
            await asyncio.sleep(INTERVAL_S)
