"""A service that answers `/stats` and `/health` as a test tells it to, on a port of its own."""

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from batcher import ContinuousStats
from serve_app.ingress.status import with_totals
from serve_app.stats import ServiceStats
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


def llm(
    replica: str, *, out: float = 0, tenants: dict[str, int] | None = None, **stats: Any
) -> dict[str, Any]:
    """Return the entry of a replica with a language model.

    Args:
        replica: Its id.
        out: Tokens that its engine samples per second; its prompts have twice as many.
        tenants: Output tokens of each tenant.
        stats: Statistics of its batcher.
    """
    given = {"running": 3, "running_cost": 25_000, "capacity": 100_000, "max_running": 64, **stats}
    usage = {
        "tenants": {
            name: {
                "calls": 2,
                "prompt": 40,
                "cached": 8,
                "output": output,
                "cost": 0,
                "tokens_per_s": output / 2,
            }
            for name, output in (tenants or {}).items()
        },
        "own": {},
        "engine": {"prompt": 200, "output": 100, "preempted": 4},
    }
    rates = {
        "over_s": 2.5,
        "requests_per_s": 5.0,
        "prompt_tokens_per_s": 2 * out,
        "output_tokens_per_s": out,
        "busy": 0.75,
    }
    # JSON, as it comes over HTTP: its keys are texts.
    batcher = json.loads(json.dumps(asdict(ContinuousStats(**given))))
    about = {"replica": replica, "max_model_len": 2048, "adapters": []}
    return {**about, "usage": usage, "rates": rates, "batcher": batcher}


def stats_of(models: Any, health: Any = None, **more: Any) -> ServiceStats:
    """Return the statistics of a service, from what its replicas report.

    Args:
        models: `models` of `/stats`, with the replicas alone.
        health: `models` of `/health`.
        more: Other parts of `/stats`.
    """
    return ServiceStats.model_validate(with_totals({"models": dict(models), **more}, health or {}))
