"""Engines that answer after a while, in place of deployment handles and Ray Serve's controller."""

import asyncio
import random
from collections.abc import AsyncIterator
from typing import Any

from pydantic_core import to_json

from serve_app.api.protocol import JSON
from serve_app.rows.engines import EngineClient
from serve_app.settings.schema import parse
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest
from tests.serve_app.answers import complete
from tests.serve_app.ingress.engine_doubles import Answer

MODEL = "demo"
HEAD = Head(200, [(b"content-type", b"application/json")])


class Handle:
    """The handle of an Engine with so many places.

    Args:
        places: Rows that run at once.
        row_s: Seconds that a row takes on average.
        answer_bytes: Bytes of an answer.
    """

    def __init__(self, places: int, row_s: float, answer_bytes: int) -> None:
        self._places = asyncio.Semaphore(places)
        self._most = places
        self._row_s = row_s
        self._answer = complete(HEAD, to_json({"choices": [{"message": {"content": "x" * answer_bytes}}]}))
        self._random = random.Random(0)
        self._asked = self._running = 0

    def options(self, **_: Any) -> "Handle":
        """Return the handle of a method."""
        return self

    def remote(self, request: RelayRequest) -> Answer:
        """Answer a row."""
        return Answer(self._messages())

    def broadcast(self, method: str) -> "Handle":
        """Return the answer of all replicas."""
        return self

    async def results_async(self) -> list[JSON]:
        """Return their statistics."""
        running = {"running": self._running, "running_cost": self._running, "capacity": 1 << 30}
        queue = {"max_running": self._most, "queue_depth": self._asked - self._running}
        return [{"replica": "a", "batcher": running | queue}]

    async def _messages(self) -> AsyncIterator[bytes]:
        self._asked += 1
        try:
            async with self._places:
                self._running += 1
                await asyncio.sleep(self._row_s * self._random.uniform(0.5, 1.5))
                self._running -= 1
        finally:
            self._asked -= 1
        yield self._answer


class Health:
    """The state of the deployments: one replica runs."""

    async def running(self, model: str) -> int:
        """Return the replicas of a model."""
        return 1


def client_of(handle: Handle) -> EngineClient:
    """Return the client of an engine."""
    handles: Any = {MODEL: handle}
    health: Any = Health()
    return EngineClient(parse({"models": [{"id": MODEL, "source": "x"}]}), handles, health)
