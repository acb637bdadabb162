"""The adapters of the service, from the reports of replicas that the test plays."""

from collections.abc import Sequence
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.ingress.adapters import ServedAdapters
from serve_app.ingress.routing import Routing
from serve_app.settings.schema import parse

MODELS: Any = [
    {"id": "demo", "source": "x", "adapters": [{"source": "org/words"}]},
    {"id": "plain", "source": "x"},
    {"id": "rank", "kind": "function", "target": "a:B"},
]


class Fleet:
    """Replicas of the model `demo`."""

    def __init__(self) -> None:
        settings = parse({"models": MODELS})
        self.routing = Routing(settings.models)
        self.asked: list[str] = []
        self.replicas: list[JSON] = []
        self.now = 0.0
        self.served = ServedAdapters(settings.models, self.routing, self._ask, lambda: self.now)

    async def _ask(self, model: str) -> Sequence[JSON]:
        self.asked.append(model)
        return self.replicas


async def test_only_unknown_names_ask_the_replicas_and_not_too_often() -> None:
    fleet = Fleet()
    for name in ("demo", "demo:words", "plain", "rank", None):
        await fleet.served.find(name)
    assert fleet.asked == []
    for _ in range(3):
        await fleet.served.find("more")
    assert fleet.asked == ["demo"]
    fleet.replicas = [{"adapters": [{"id": "more", "root": "more"}]}, {"adapters": []}]
    fleet.now = 5.0
    await fleet.served.find("more")
    assert "more" in fleet.routing
    assert "demo:words" not in fleet.routing


async def test_a_model_without_replicas_keeps_its_adapters() -> None:
    fleet = Fleet()
    await fleet.served.refresh()
    assert "demo:words" in fleet.routing


async def test_a_service_without_adapters_asks_nobody() -> None:
    fleet = Fleet()
    served = ServedAdapters(parse({"models": MODELS[1:]}).models, fleet.routing, fleet._ask)
    await served.find("unknown")
    assert fleet.asked == []
