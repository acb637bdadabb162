"""The Quotas deployment: the quotas of keys and tenants, behind a deployment handle."""

from math import isfinite

from serve_app.api.protocol import JSON
from serve_app.quotas.counters import HolderAnswer, HolderReport
from serve_app.settings.schema import Settings
from serve_app.stats import LimitStats, QuotasStats
from serve_app.system.cpu_scheduling import use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.serve_logging import flush_warnings


class Quotas:
    """Quotas of keys and tenants. It has one replica, since one process keeps the counters.

    Args:
        settings: The config's `args`, with `usage.quotas`.

    Raises:
        UnusableError: The database can't be used.
        DatabaseError: The database fails.
        SettingsError: The file of quotas is invalid.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        flush_warnings()
        quotas = settings.usage.quotas
        assert quotas is not None
        # Import the database's package only where quotas are kept.
        from serve_app.quotas.service import QuotaService, place_of
        from serve_app.quotas.state import StoredState

        self._service = QuotaService(quotas, StoredState(place_of(quotas, settings.batches)))
        self._service.start()
        self._metrics = None
        if settings.telemetry.metrics:
            from serve_app.quotas.metrics import QuotaMetrics

            self._metrics = QuotaMetrics(self._service.states, settings.telemetry.tenants)
            self._metrics.start()
        use_batch_scheduling()
        collect_rarely()

    async def take(self, report: HolderReport) -> HolderAnswer:
        """Apply the report of an Engine, and grant it blocks within the limits."""
        return await self._service.take(report)

    async def stats(self) -> JSON:
        """Return the state of all limits, by key and tenant."""
        limits = {}
        async for subject, states in self._service.states():
            # Each part becomes JSON by itself, so that many keys don't hold up the loop.
            limits[subject] = {
                state.name: LimitStats(
                    limit=state.limit,
                    remaining=state.remaining,
                    reserved=state.reserved,
                    ends_in_s=round(state.ends_in_s, 1) if isfinite(state.ends_in_s) else None,
                ).body()
                for state in states
            }
        return QuotasStats(holders=self._service.holders).body() | {"limits": limits}

    async def check_health(self) -> None:
        """Raise an error if the quotas are no longer kept, so that Serve replaces this replica."""
        self._service.check()

    async def __del__(self) -> None:
        if metrics := getattr(self, "_metrics", None):
            metrics.stop()
        if service := getattr(self, "_service", None):
            await service.close()
