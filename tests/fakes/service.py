"""HTTP services on loopback: one that a function answers, and one that runs an application."""

import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple

from tests.ports import free_port
from tests.progress import STILL_S, wait_until


class Asked(NamedTuple):
    """A request.

    Attributes:
        method, path: Its method, and its path with the query.
        headers: Its headers, with names in lower case.
        body: Its body.
    """

    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes


class Reply(NamedTuple):
    """An answer.

    Attributes:
        content: Bytes and text as they are; another value as JSON.
        status: The status.
        headers: Further headers.
    """

    content: Any = b""
    status: int = 200
    headers: Mapping[str, str] = {}


Answer = Callable[[Asked], Reply]
"""Answers a request, in a thread of its connection."""


class Service:
    """An HTTP server on loopback that a function answers.

    Args:
        answer: Answers each request; may be changed while it runs.

    Attributes:
        answer: The function.
        port: The port; it stays over `stop` and `start`.
    """

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.port = 0
        self.start()

    @property
    def url(self) -> str:
        """The URL."""
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Listen."""
        service = self

        class Handler(BaseHTTPRequestHandler):
            def _answer(self) -> None:
                body = self.rfile.read(int(self.headers.get("content-length") or 0))
                headers = {name.lower(): value for name, value in self.headers.items()}
                reply = service.answer(Asked(self.command, self.path, headers, body))
                content = reply.content
                if not isinstance(content, bytes):
                    content = (content if isinstance(content, str) else json.dumps(content)).encode()
                # The client may leave in the middle of the answer.
                with suppress(ConnectionError):
                    self.send_response(reply.status)
                    for name, value in ({"content-length": str(len(content))} | dict(reply.headers)).items():
                        self.send_header(name, value)
                    self.end_headers()
                    if self.command != "HEAD":
                        self.wfile.write(content)

            do_GET = do_HEAD = do_POST = do_PUT = _answer  # noqa: N815

            def log_message(self, *args: object) -> None:
                """Log nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", self.port), Handler)
        self.port = self._server.server_port
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._thread.join(STILL_S)
        self._server.server_close()


@contextmanager
def serving(answer: Answer) -> Iterator[Service]:
    """Run a service until the block ends."""
    service = Service(answer)
    try:
        yield service
    finally:
        service.stop()


@contextmanager
def running(app: Any) -> Iterator[str]:
    """Run an ASGI application on a port of loopback until the block ends; yield its URL."""
    # Tests of the library alone have no uvicorn.
    import uvicorn

    port = free_port()
    server = uvicorn.Server(uvicorn.Config(app, host="127.0.0.1", port=port, log_level="critical"))
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    wait_until(lambda: server.started, every_s=0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(STILL_S)
