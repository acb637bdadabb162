"""A service that answers `/stats` and `/health` as a test tells it to, on a port of its own."""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from batcher import ContinuousStats
from serve_app.cli.figures import Poll
from serve_app.stats import ServiceHealth, ServiceStats

Answer = Callable[[str, dict[str, str]], tuple[int, Any]]
"""Returns the status and the body of an answer, of a path and its headers; a text is sent as it is."""


class FakeService:
    """An HTTP server on the loopback interface.

    Attributes:
        answer: Makes its answers; may be changed while it runs.
        port: Its port, which it keeps over `stop` and `start`.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                headers = {name.lower(): value for name, value in self.headers.items()}
                status, body = service.answer(self.path, headers)
                content = (body if isinstance(body, str) else json.dumps(body)).encode()
                self.send_response(status)
                self.send_header("content-length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()


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
