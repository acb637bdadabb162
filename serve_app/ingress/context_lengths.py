"""Context lengths of the models, as their replicas report them."""

import asyncio
import logging
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.ingress.replica_stats import start_replica
from serve_app.ingress.routing import Routing
from serve_app.settings.models import FunctionSettings

logger = logging.getLogger("ray.serve")

RETRY_S = 15.0
"""Seconds after which a request for a model that starts may be tried again."""


class ContextLengths:
    """Context lengths of the models, in tokens.

    Args:
        routing: The models.
        replicas: Returns the statistics of a model's replicas, by the model's id.
        engines: Handle of the Engine of each model; a call starts a model that has no replica.
    """

    def __init__(
        self,
        routing: Routing,
        replicas: Callable[[str], Awaitable[Sequence[JSON]]],
        engines: Mapping[str, Any],
    ) -> None:
        self._routing = routing
        self._replicas = replicas
        self._engines = engines
        self._starting: dict[str, asyncio.Task[None]] = {}
        self._known: dict[str, int] = {}
        self._locks: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._answers: Counter[str] = Counter()

    async def of(self, name: str) -> int | None:
        """Return the context length of a model; None: it is a function, or has not started yet."""
        if (known := self._known.get(name)) is not None:
            return known
        model = self._routing.find(name)
        if isinstance(model, FunctionSettings):
            return None
        before = self._answers[name]
        async with self._locks[name]:
            # Each question goes to every replica: those that come during one share its answer.
            if self._answers[name] == before:
                for replica in await self._replicas(name):
                    self._known[name] = replica["max_model_len"]
                self._answers[name] += 1
        return self._known.get(name, model.engine.context)

    def refusal(self, name: str, error: RequestError) -> RequestError:
        """Return the error of a request that its quotas don't allow.

        One that never fits may fit once the context of its model is known: the model is started, and the
        request may come again.

        Args:
            name: The model.
            error: The error of the quotas.
        """
        model = self._routing.find(name)
        known = isinstance(model, FunctionSettings) or name in self._known or model.engine.context
        if error.status != 400 or known:
            return error
        if name not in self._starting:
            self._starting[name] = task = asyncio.create_task(start_replica(self._engines[name]))
            task.add_done_callback(lambda task: self._started(name, task))
        message = (
            f"{name}: its context length is not known until it has started, nor how many tokens this request "
            f"takes at most. Try again in {RETRY_S:g} s, or lower max_tokens."
        )
        return RequestError(503, "service_unavailable", message, retry_after_s=RETRY_S)

    def _started(self, name: str, task: asyncio.Task[None]) -> None:
        del self._starting[name]
        if not task.cancelled() and (error := task.exception()):
            logger.warning("%s was not started: %r", name, error)
