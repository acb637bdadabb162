"""Context lengths of the models, as their replicas report them."""

import asyncio
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence

from serve_app.api.protocol import JSON
from serve_app.ingress.routing import Routing
from serve_app.settings.models import FunctionSettings


class ContextLengths:
    """Context lengths of the models, in tokens.

    Args:
        routing: The models.
        replicas: Returns the statistics of a model's replicas, by the model's id.
    """

    def __init__(self, routing: Routing, replicas: Callable[[str], Awaitable[Sequence[JSON]]]) -> None:
        self._routing = routing
        self._replicas = replicas
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
        return self._known.get(name, model.engine.max_model_len)
