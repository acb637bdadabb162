"""The adapters of the service, as the replicas of the models report them."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Sequence

from serve_app.api.protocol import JSON
from serve_app.ingress.routing import Routing
from serve_app.settings.models import FunctionSettings, ModelSettings

MAX_AGE_S = 1.0
"""Seconds for which a report is used again: unknown names, which anyone can send, ask the replicas no more
often."""


class ServedAdapters:
    """Keeps the adapters of a `Routing` up to date. A model without replicas keeps those that it had.

    Args:
        models: The models.
        routing: Gets their adapters.
        replicas: Returns the statistics of a model's replicas, by the model's id.
        clock: Seconds.
    """

    def __init__(
        self,
        models: Sequence[ModelSettings],
        routing: Routing,
        replicas: Callable[[str], Awaitable[Sequence[JSON]]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._bases = [
            model.id for model in models if not isinstance(model, FunctionSettings) and model.has_adapters
        ]
        self._routing = routing
        self._replicas = replicas
        self._clock = clock
        self._read_at = float("-inf")
        self._lock = asyncio.Lock()

    async def find(self, name: str | None) -> None:
        """Ask the replicas for their adapters if a name is not known."""
        if name is not None and name not in self._routing:
            await self.refresh()

    async def refresh(self, max_age_s: float = MAX_AGE_S) -> None:
        """Ask the replicas for their adapters, unless that is no longer ago than `max_age_s`."""
        if not self._bases:
            return
        async with self._lock:
            if self._clock() - self._read_at < max_age_s:
                return
            found = await asyncio.gather(*map(self._replicas, self._bases))
            for base, replicas in zip(self._bases, found, strict=True):
                if replicas:
                    adapters = {
                        adapter["id"]: adapter["root"]
                        for replica in replicas
                        for adapter in replica.get("adapters", ())
                    }
                    self._routing.set_adapters(base, adapters)
            self._read_at = self._clock()
