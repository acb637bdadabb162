"""Metrics of the quotas, from the states of their limits."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable

from serve_app.quotas.counters import LimitState, slices
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import TenantLabels

logger = logging.getLogger("ray.serve")

INTERVAL_S = 2.0
"""Seconds between two reports."""

States = AsyncIterator[tuple[str, tuple[LimitState, ...]]]


class QuotaMetrics:
    """Records the used share of each limit, periodically.

    The keys and tenants with the highest shares have their own series; the highest share of all others is one
    series.

    Args:
        states: Yields each subject with the states of its limits.
        most: Maximum subjects with their own series.
        meters: Instruments of `catalogue.QUOTAS`; None: Ray's instruments.
    """

    def __init__(self, states: Callable[[], States], most: int, meters: Meters | None = None) -> None:
        self._states = states
        self._meters = meters or Meters(catalogue.QUOTAS)
        self._labels = TenantLabels(most)
        self._recorded: set[tuple[str, str]] = set()
        self._task: asyncio.Task[None] | None = None

    def start(self) -> None:
        """Start, on the running loop."""
        self._task = asyncio.get_running_loop().create_task(self._run())

    def stop(self) -> None:
        """Stop reporting."""
        if self._task is not None:
            self._task.cancel()

    async def report(self) -> None:
        """Record the states once."""
        shares: dict[str, list[tuple[str, float]]] = {}
        most: dict[str, int] = {}
        async for subject, states in self._states():
            shares[subject] = [(state.name, 1 - state.remaining / state.limit) for state in states]
            most[subject] = int(1000 * max((share for _, share in shares[subject]), default=0.0))
        self._labels.round(most)
        fullest: dict[tuple[str, str], float] = {}
        for part in slices(shares.items()):
            for subject, used in part:
                label = self._labels.label(subject)
                for limit, share in used:
                    fullest[label, limit] = max(fullest.get((label, limit), 0.0), share)
            await asyncio.sleep(0)
        for (label, limit), share in fullest.items():
            self._meters.record(catalogue.QUOTA_USED, share, label, limit)
        # A gauge keeps its last value, so limits that are gone are set to 0.
        for label, limit in self._recorded.difference(fullest):
            self._meters.record(catalogue.QUOTA_USED, 0.0, label, limit)
        self._recorded = set(fullest)

    async def _run(self) -> None:
        while True:
            try:
                await self.report()
            except Exception:
                # A failure of telemetry must not stop the quotas.
                logger.exception("quotas: no metrics")
            await asyncio.sleep(INTERVAL_S)
