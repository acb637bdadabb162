"""The Batches deployment: files and batches, behind a deployment handle."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import KeyStore
from serve_app.ingress.status import Health
from serve_app.settings.batches import BatchesSettings
from serve_app.settings.schema import Settings
from serve_app.system.cpu_scheduling import BACKGROUND_NICE, use_batch_scheduling
from serve_app.system.garbage_collection import collect_rarely
from serve_app.system.serve_logging import flush_warnings
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

DRAIN_S = 5.0
"""Seconds for rows in flight to end when this replica stops. The next replica sends the other rows again."""


class Batches:
    """Files and batches of OpenAI's API. One replica: one process has the state open.

    Args:
        settings: The config's `args`, with `batches`.
        engines: The handle of each model's Engine, by model id.
        quotas: Whether the service keeps quotas.

    Raises:
        StoreError: The folder, the contents or the database fails.
        UnusableError: The database can't be used as it is.
    """

    # Serve awaits a constructor that is a coroutine.
    async def __init__(  # type: ignore[misc]
        self,
        settings: Settings,
        engines: Mapping[str, DeploymentHandle[Any]],
        quotas: bool = False,
    ) -> None:
        flush_warnings()
        # Imported only here: no other process needs a database.
        from serve_app.jobs.errors import StoreError
        from serve_app.jobs.service import BatchesMetrics, BatchService
        from serve_app.rows.engines import EngineClient

        assert settings.batches is not None
        context = serve.get_replica_context()
        health = Health(context.app_name, list(engines))
        keys = KeyStore(settings.access, quotas=quotas) if settings.access else None
        if keys:
            keys.watch()
        self._keys = keys
        client = EngineClient(settings, engines, health, keys)
        try:
            self._service = await BatchService.open(settings.batches, client, client.models, keys)
        except OSError as error:
            raise StoreError(_unusable(settings.batches, error)) from error
        self._metrics = None
        if settings.telemetry.metrics:
            self._metrics = BatchesMetrics(self._service.stats, client.lost_calls)
            self._metrics.start()
        use_batch_scheduling(BACKGROUND_NICE)
        collect_rarely()

    async def relay(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        """Answer an HTTP request, as relay messages."""
        async with aclosing(self._service.relay(request)) as messages:
            async for message in messages:
                yield message

    async def put(self, upload: str, data: bytes, last: bool) -> bool:
        """Add a piece to the body of a request once there is room.

        Args:
            upload: The request's `RelayRequest.upload`.
            data: The piece.
            last: Whether this is the last piece.

        Returns:
            Whether the piece was taken; if not, the request has already been answered.
        """
        return await self._service.uploads.put(upload, data, last)

    async def stats(self) -> JSON:
        """Return the entry of the batches in `/stats`."""
        return await self._service.stats()

    async def check_health(self) -> None:
        """Raise if the runner of the batches or the watcher of the API keys has ended.

        Ray Serve then replaces this replica.
        """
        self._service.check()
        if self._keys:
            self._keys.check()

    async def __del__(self) -> None:
        if metrics := getattr(self, "_metrics", None):
            metrics.stop()
        if service := getattr(self, "_service", None):
            await asyncio.shield(service.close(DRAIN_S))


def _unusable(settings: BatchesSettings, error: OSError) -> str:
    """Return the message about an unusable place, with the settings that name it."""
    # Imported only here: no other process needs a database.
    from serve_app.system.database import DatabaseError

    if isinstance(error, DatabaseError):
        # The message names the file or the server.
        field = "database" if settings.database else "database_env" if settings.database_env else "folder"
        return f"batches.{field}: {error}"
    places = {"batches.folder": settings.folder, "batches.content": settings.content}
    named = " or ".join(f"{field} ({place})" for field, place in places.items() if place)
    return f"{named}: {error}; it must be a place where the service can make folders and write files"
