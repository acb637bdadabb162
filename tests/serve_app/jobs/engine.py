"""A fast double of the engines."""

import asyncio
from collections import Counter
from collections.abc import Callable, Collection
from random import Random

from serve_app.api.protocol import JSON
from serve_app.rows.pacing import EngineLoad
from serve_app.rows.rows import RowAnswer, RowRequest
from tests.progress import STILL_S

USAGE = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
"""The usage of each answer."""


def custom_id_of(body: JSON) -> str:
    """Return the `custom_id` of a row that `helpers.row` made."""
    return str(body["messages"][0]["content"])


class Served:
    """What a client says of models and loads where nothing is known of either."""

    async def refresh(self, wake: bool = False) -> Collection[str]:
        return ()

    def base_of(self, model: str) -> str | None:
        return model

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return nothing: the load isn't known."""
        return None


class Engine(Served):
    """Answers each row with its `custom_id`.

    Args:
        status: Returns the status of a try; an exception that it raises is one of the connection.

    Attributes:
        final: Answers that aren't to be tried again, by row.
        tries: All tries, by row.
        sent: Rows in the order of their first tries, with their tenants.
        bodies: The last body of each row.
        weights: The last weight of each tenant.
        models: The models that each row may name.
        running: Tries under way.
        most: Most tries that were ever under way.
        go: While it is cleared, no try is answered.
        places: Tries that it says to run at once; None: its load isn't known.
    """

    def __init__(self, status: Callable[[str], int] = lambda _: 200, random: Random | None = None) -> None:
        self.final: Counter[str] = Counter()
        self.tries: Counter[str] = Counter()
        self.sent: list[tuple[str, str]] = []
        self.bodies: dict[str, JSON] = {}
        self.weights: dict[str, float | None] = {}
        self.models: dict[str, Collection[str] | None] = {}
        self.places: int | None = None
        self.running = 0
        self.most = 0
        self.go = asyncio.Event()
        self.go.set()
        self.changed = asyncio.Event()
        self._status = status
        self._random = random or Random(0)

    async def send(self, request: RowRequest) -> RowAnswer:
        """Answer a row."""
        scheduling, body = request.scheduling, request.body
        custom_id = custom_id_of(body)
        if not self.tries[custom_id]:
            self.sent.append((scheduling.tenant, custom_id))
        self.tries[custom_id] += 1
        self.bodies[custom_id] = body
        self.weights[scheduling.tenant] = scheduling.weight
        self.models[custom_id] = request.models
        self.running += 1
        self.most = max(self.most, self.running)
        self.changed.set()
        try:
            for _ in range(self._random.randrange(4)):
                await asyncio.sleep(0)
            await self.go.wait()
            status = self._status(custom_id)
        finally:
            self.running -= 1
        if status in (200, 400):
            self.final[custom_id] += 1
        return RowAnswer(status, {"echo": custom_id} | ({"usage": USAGE} if status == 200 else {}))

    async def load(self, base: str | None) -> EngineLoad | None:
        """Return the load, if the number of places is set."""
        if self.places is None:
            return None
        running = min(self.running, self.places)
        return EngineLoad(running, self.running - running, self.places - running)

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until a condition holds, which is looked at whenever a try begins."""
        async with asyncio.timeout(STILL_S):
            while not condition():
                self.changed.clear()
                await self.changed.wait()
