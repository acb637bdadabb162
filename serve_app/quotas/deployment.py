"""The Quotas deployment: the quotas of keys and tenants, behind a deployment handle."""

import logging
import os
from pathlib import Path

from serve_app.api.protocol import JSON
from serve_app.quotas.messages import Answer, Report
from serve_app.quotas.service import QuotaService
from serve_app.quotas.state import State, open_state
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.schema import Settings, SettingsError
from serve_app.settings.usage import QuotasSettings
from serve_app.system.cpu_scheduling import use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.serve_logging import flush_warnings

logger = logging.getLogger("ray.serve")

FOLDER = "quotas"
"""Folder of the state inside that of the batches."""


class Quotas:
    """Quotas of keys and tenants. One replica: one process keeps the book.

    Args:
        settings: The config's `args`, with `usage.quotas`.

    Raises:
        StateError: The database can't be used.
        SettingsError: The file of quotas is wrong.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(self, settings: Settings) -> None:  # type: ignore[misc]
        flush_warnings()
        quotas = settings.usage.quotas
        assert quotas is not None
        self._service = QuotaService(quotas, place_of(quotas, settings.batches))
        self._service.start()
        self._metrics = None
        if settings.telemetry.metrics:
            from serve_app.quotas.metrics import QuotaMetrics

            self._metrics = QuotaMetrics(self._service.states, settings.telemetry.tenants)
            self._metrics.start()
        use_batch_scheduling()
        collect_rarely()

    async def exchange(self, report: Report) -> Answer:
        """Take the report of a replica that holds leases, and return the answer."""
        return await self._service.exchange(report)

    async def stats(self) -> JSON:
        """Return the state of all limits, by key and tenant."""
        return {
            "holders": self._service.holders,
            "limits": {
                subject: {
                    state.name: {
                        "limit": state.limit,
                        "remaining": state.remaining,
                        "reserved": state.reserved,
                        "ends_in_s": round(state.ends_in_s, 1),
                    }
                    for state in states
                }
                for subject, states in self._service.states().items()
            },
        }

    async def check_health(self) -> None:
        """Raise if the quotas aren't kept any more, so that Serve replaces this replica."""
        self._service.check()

    async def __del__(self) -> None:
        if metrics := getattr(self, "_metrics", None):
            metrics.stop()
        if service := getattr(self, "_service", None):
            await service.close()


def place_of(quotas: QuotasSettings, batches: BatchesSettings | None) -> State:
    """Return the database of the quotas: their own, or else that of the batches.

    Raises:
        StateError: It can't be used.
        SettingsError: The environment has no URL.
    """
    if quotas.folder is not None:
        return open_state(Path(quotas.folder).expanduser(), None)
    url, name, field = quotas.database, quotas.database_env, "usage.quotas.database_env"
    folder = None
    if url is None and name is None:
        assert batches is not None
        url, name, field = batches.database, batches.database_env, "batches.database_env"
        folder = Path(batches.folder).expanduser() / FOLDER
    if name is not None and not (url := os.environ.get(name)):
        raise SettingsError(f"{field}: the environment of the replica has no variable {name}")
    return open_state(folder, url)
