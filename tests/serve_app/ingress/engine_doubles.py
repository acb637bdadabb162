"""Handles of Engines that a test plays, and an Ingress in front of them."""

import asyncio
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import httpx
import pytest
from ray import serve
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.applications import Starlette
from starlette.types import Message

from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import Health, HealthReport, ModelState
from serve_app.settings.schema import parse
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest
from tests.progress import STILL_S
from tests.serve_app.answers import complete

LIMIT_S = STILL_S
PLAIN = Head(200, [(b"content-type", b"application/json"), (b"x-mine", b"1")])
STREAM = Head(200, [(b"content-type", b"text/event-stream; charset=utf-8")])
CHAT = "/v1/chat/completions"

Answering = Callable[[RelayRequest], AsyncIterator[bytes]]


class Answer(DeploymentResponseGenerator[bytes]):
    """The result of a handle for a call that streams.

    Attributes:
        stopped: Set once the call was cancelled.
    """

    def __init__(self, messages: AsyncIterator[bytes]) -> None:
        self.stopped = asyncio.Event()
        self._messages = messages

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._messages

    async def __anext__(self) -> bytes:
        return await anext(self._messages)

    def cancel(self) -> None:
        self.stopped.set()


@dataclass
class Engine:
    """The handle of an Engine.

    Attributes:
        answering: What it answers with.
        requests: What it was asked over the relay.
        answers: What it gave back.
        stats: What its replicas report; an exception is raised.
        options_given: The options that its callers set.
        broadcasts: Methods that were called on every replica.
        asked: Set once it was asked over the relay.
    """

    answering: Answering
    requests: list[RelayRequest] = field(default_factory=list)
    answers: list[Answer] = field(default_factory=list)
    stats: list[Any] | Exception = field(default_factory=list)
    options_given: list[dict[str, Any]] = field(default_factory=list)
    broadcasts: list[str] = field(default_factory=list)
    asked: asyncio.Event = field(default_factory=asyncio.Event)

    def options(self, **options: Any) -> "Engine":
        self.options_given.append(options)
        return self

    def remote(self, request: RelayRequest) -> Answer:
        assert self.options_given[0]["method_name"] == "relay"
        assert self.options_given[0]["stream"] is True
        self.requests.append(request)
        self.answers.append(Answer(self.answering(request)))
        self.asked.set()
        return self.answers[-1]

    def broadcast(self, method: str) -> "Engine":
        self.broadcasts.append(method)
        return self

    async def results_async(self) -> list[Any]:
        if isinstance(self.stats, Exception):
            raise self.stats
        return self.stats


def answer(*messages: bytes | Exception) -> Answering:
    """Return how an engine answers with fixed messages; an exception is raised."""

    async def answering(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        for message in messages:
            if isinstance(message, Exception):
                raise message
            yield message

    return answering


async def echo(request: RelayRequest) -> AsyncGenerator[bytes, None]:
    """Answer with what arrived."""
    content = {"path": request.path, "body": request.body.decode("latin-1")}
    yield complete(PLAIN, json.dumps(content).encode())


@pytest.fixture(autouse=True)
def health(monkeypatch: pytest.MonkeyPatch) -> dict[str, ModelState]:
    """The health of each model, as the test wants it."""
    models: dict[str, ModelState] = {}

    async def read(self: Health) -> HealthReport:
        return HealthReport(models, self._simulated)

    context = SimpleNamespace(app_name="llm", replica_tag="one")
    monkeypatch.setattr(serve, "get_replica_context", lambda: context)
    monkeypatch.setattr(Health, "read", read)
    # This process has tests to run yet.
    monkeypatch.setattr("serve_app.ingress.deployment.use_batch_scheduling", lambda nice: None)
    monkeypatch.setattr("serve_app.auth.bind_check.serve_host", lambda: "127.0.0.1")
    return models


FUNCTIONS = {"rank", "embed"}
"""The names that stand for a function; all others are language models."""


def application(engines: dict[str, Engine], **limits: Any) -> Starlette:
    function = {"kind": "function", "target": "a:B"}
    models = [
        {"id": model}
        | (function | {"embeddings": model == "embed"} if model in FUNCTIONS else {"source": "x"})
        for model in engines
    ]
    settings = parse({"models": models, "ingress": limits})
    handles = cast(dict[str, DeploymentHandle[Any]], engines)
    return Ingress(settings, handles).__serve_build_asgi_app__()


class Client(httpx.AsyncClient):
    """A client of an Ingress in front of `engines`."""

    def __init__(self, engines: Engine | dict[str, Engine] | None = None, **limits: float) -> None:
        if not isinstance(engines, dict):
            engines = {"demo": engines or Engine(echo)}
        self.engines = engines
        transport = httpx.ASGITransport(application(engines, **limits))
        super().__init__(transport=transport, base_url="http://saturate:8000", timeout=LIMIT_S)

    async def request(self, *args: Any, **options: Any) -> httpx.Response:
        async with asyncio.timeout(LIMIT_S):
            return await super().request(*args, **options)

    @property
    def engine(self) -> Engine:
        (engine,) = self.engines.values()
        return engine


class Call:
    """One request, of which the test sees each ASGI message and decides when the client leaves.

    Attributes:
        sent: What the application sends, as it sends it.
        task: Ends when the application has.
    """

    def __init__(self, app: Starlette, path: str, body: bytes = b"{}") -> None:
        self.sent: asyncio.Queue[Message] = asyncio.Queue()
        self._received = [{"type": "http.request", "body": body, "more_body": False}]
        self._left = asyncio.Event()
        scope: Message = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"host", b"saturate"), (b"content-type", b"application/json")],
        }
        self.task = asyncio.ensure_future(app(scope, self._receive, self.sent.put))

    async def _receive(self) -> Message:
        if self._received:
            return self._received.pop()
        await self._left.wait()
        return {"type": "http.disconnect"}

    async def leave(self) -> None:
        """Leave as a client does: Serve tells the application and cancels it."""
        self._left.set()
        self.task.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self.task})

    async def next(self) -> Message:
        async with asyncio.timeout(LIMIT_S):
            return await self.sent.get()


def check_error(response: httpx.Response, status: int, type: str, param: str | None = None) -> str:
    """Check an error's status and its shape, which is OpenAI's, and return its message."""
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    error = response.json()["error"]
    assert sorted(error) == ["code", "message", "param", "type"]
    assert (error["type"], error["param"], error["code"]) == (type, param, status)
    message: str = error["message"]
    return message
