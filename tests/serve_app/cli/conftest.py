import json
import socket
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.ports import free_port
from tests.serve_app.cli.launching import Service


@pytest.fixture
def taken() -> Iterator[int]:
    """A port of the loopback interface with a listener."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.fixture
def dashboard(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[dict[str, Any]], list[str]]]:
    """Stands in for Ray's dashboard: takes its answer, returns the list of its requests."""
    servers = []

    def play(details: dict[str, Any]) -> list[str]:
        asked: list[str] = []

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0)).decode()
                asked.append(f"{self.command} {body}".strip())
                self.send_response(200)
                self.end_headers()
                self.wfile.write(json.dumps(details).encode())

            do_GET = do_PUT = _answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        servers.append(server)
        threading.Thread(target=server.serve_forever, daemon=True).start()
        urls = [f"http://127.0.0.1:{free_port()}/", f"http://127.0.0.1:{server.server_port}/"]
        monkeypatch.setattr("serve_app.cli.dashboard.DASHBOARDS", urls)
        return asked

    yield play
    for server in servers:
        server.shutdown()


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Callable[..., Service]]:
    """Starts `saturate serve` on the tests' `serve`."""
    services: list[Service] = []

    def start(**options: Any) -> Service:
        folder = tmp_path / str(len(services))
        folder.mkdir()
        services.append(Service(folder, **options))
        return services[-1]

    yield start
    for service in services:
        service.end()
