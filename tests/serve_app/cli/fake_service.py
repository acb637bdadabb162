"""A service that answers `/stats` and `/health` as a test tells it to, on a port of its own."""

import json
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from typing import Any

from batcher import ContinuousStats
from serve_app.cli.figures import Poll
from serve_app.stats import ServiceHealth, ServiceStats
from tests.fakes.service import Asked, Reply, Service

Answer = Callable[[str, dict[str, str]], tuple[int, Any]]
"""Returns the status and the body of an answer, of a path and its headers; a text is sent as it is."""


class FakeService:
    """A service on loopback whose answers depend on the path and the headers alone.

    Attributes:
        answer: Makes its answers; may be changed while it runs.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self._service = Service(self._reply)
        self.start, self.stop = self._service.start, self._service.stop

    @property
    def url(self) -> str:
        return self._service.url

    @property
    def port(self) -> int:
        """Its port, which it keeps over `stop` and `start`."""
        return self._service.port

    def _reply(self, asked: Asked) -> Reply:
        status, content = self.answer(asked.path, dict(asked.headers))
        return Reply(content, status)


def llm(replica: str, *, out: int = 0, tenants: dict[str, int] | None = None, **stats: Any) -> dict[str, Any]:
    """Return the entry of a replica with a language model.

    Args:
        replica: Its id.
        out: Tokens that its engine has sampled since the start.
        tenants: Output tokens of each tenant.
        stats: Statistics of its batcher.
    """
    given = {"running": 3, "running_cost": 25_000, "capacity": 100_000, "max_running": 64, **stats}
    usage = {
        "tenants": {
            name: {"calls": 2, "prompt": 40, "cached": 8, "output": output, "cost": 0}
            for name, output in (tenants or {}).items()
        },
        "own": {},
        "engine": {"prompt": 2 * out, "output": out},
    }
    # JSON, as it comes over HTTP: its keys are texts.
    batcher = json.loads(json.dumps(asdict(ContinuousStats(**given))))
    return {"replica": replica, "max_model_len": 2048, "usage": usage, "adapters": [], "batcher": batcher}


NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)


def polled(at: float, models: Any, health: Any = None, **more: Any) -> Poll:
    """Return the statistics of a service at a time, from what it would send.

    Args:
        at: The time in seconds.
        models: `models` of `/stats`.
        health: `models` of `/health`.
        more: Other parts of `/stats`.
    """
    stats = ServiceStats.model_validate({"models": models, **more})
    return Poll(at, NOON, stats, ServiceHealth.model_validate({"models": health} if health else {}))
