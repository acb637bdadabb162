"""The middleware around every request: keys, the track of a request, and its end."""

import json
from collections.abc import Sequence
from typing import Any

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route
from starlette.types import Message

from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.settings.ingress import AccessSettings
from serve_app.telemetry.request_tracker import RequestTracker, TrackedRequest
from tests.progress import STILL_S

LIMIT_S = STILL_S
KEY = "sk-ada"


def entry(**more: Any) -> dict[str, Any]:
    return {"name": "ada", "sha256": hash_key(KEY.encode()), "tenant": "research"} | more


def made(*entries: dict[str, Any]) -> KeyStore:
    return KeyStore(AccessSettings(keys_env="KEYS"), environment={"KEYS": json.dumps(entries)})


def bearer(key: str) -> list[tuple[bytes, bytes]]:
    return [(b"host", b"x"), (b"authorization", f"Bearer {key}".encode())]


def around(
    app: Any,
    keys: KeyStore | None = None,
    ended: list[TrackedRequest] | None = None,
    origins: Sequence[str] = (),
) -> RequestMiddleware:
    """Return the middleware around an application.

    Args:
        app: The application.
        keys: The valid keys.
        ended: Gets each request that has ended.
        origins: Origins of pages that may call it.
    """
    tracker = RequestTracker([] if ended is None else [ended.extend])
    return RequestMiddleware(app, tracker, BodyBudget(1000), keys, origins=origins)


async def test_a_request_from_elsewhere_is_refused() -> None:
    keys = made(entry(allow_from=["10.0.0.0/8"]))

    async def ask(host: str) -> int:
        transport = httpx.ASGITransport(
            around(Starlette(routes=[Route("/who", hello)]), keys), client=(host, 5000)
        )
        async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as http:
            return (await http.get("/who", headers={"authorization": f"Bearer {KEY}"})).status_code

    assert [await ask(host) for host in ("203.0.113.9", "10.0.0.1")] == [403, 200]


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse(context_of(request.scope).key_name)


async def healthy(request: Request) -> PlainTextResponse:
    return PlainTextResponse("ok")


def client(keys: KeyStore, app: Any = None) -> httpx.AsyncClient:
    app = app or Starlette(routes=[Route("/who", hello), Route("/health", healthy)])
    return httpx.AsyncClient(transport=httpx.ASGITransport(around(app, keys)), base_url="http://saturate")


async def test_a_request_with_a_key_passes_and_has_its_caller() -> None:
    async with client(made(entry())) as http:
        response = await http.get("/who")
        assert response.status_code == 401
        assert response.headers["www-authenticate"] == "Bearer"
        assert response.json()["error"]["type"] == "authentication_error"
        assert (await http.get("/who", headers={"authorization": f"Bearer {KEY}"})).text == "ada"


@pytest.mark.parametrize("path", ["/who", "/page", "/nothing", "/healthy", "/x/health", "/x/health/../stats"])
async def test_only_health_needs_no_key(path: str) -> None:
    async with client(made(entry())) as http:
        assert (await http.get("/health")).status_code == (await http.get("/health/")).status_code == 200
        assert (await http.get(path)).status_code == 401


async def test_a_websocket_is_closed() -> None:
    sent: list[Message] = []

    async def send(message: Message) -> None:
        sent.append(message)

    async def app(*_: Any) -> Any:
        raise AssertionError

    for keys in (made(entry()), None):
        await around(app, keys)({"type": "websocket", "path": "/health", "headers": []}, app, send)
    assert [message["type"] for message in sent] == ["websocket.close"] * 2


async def test_the_start_of_the_application_needs_no_key_and_has_no_path() -> None:
    begun: list[str] = []

    async def app(scope: Any, *_: Any) -> None:
        begun.append(scope["type"])

    async def unused(*_: Any) -> Any:
        raise AssertionError

    await around(app, made(entry()))({"type": "lifespan"}, unused, unused)
    assert begun == ["lifespan"]


# The order of the middleware's parts


async def test_a_request_without_a_key_is_tracked_and_a_page_may_read_its_refusal() -> None:
    ended: list[TrackedRequest] = []
    app = around(
        Starlette(routes=[Route("/who", hello)]), made(entry()), ended, origins=["https://page.example"]
    )
    origin = {"origin": "https://page.example"}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://saturate") as http:
        refused = await http.get("/who", headers=origin)
        preflight = await http.options("/who", headers=origin | {"access-control-request-method": "POST"})
        answered = await http.get("/who", headers=origin | {"authorization": f"Bearer {KEY}"})
    assert [refused.status_code, preflight.status_code, answered.status_code] == [401, 200, 200]
    for response in (refused, preflight, answered):
        assert response.headers["access-control-allow-origin"] == "https://page.example"
    app._tracker()
    assert [(request.status, request.outcome) for request in ended] == [
        (401, "refused"),
        (200, "ok"),
        (200, "ok"),
    ]


async def test_each_request_has_a_context_of_its_own_which_ends_with_it() -> None:
    contexts = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        context = context_of(scope)
        context.body.add(600)
        contexts.append(context)
        await PlainTextResponse("ok")(scope, receive, send)

    middleware = around(app)
    state = {"mine": 1}
    scopes = [{"type": "http", "path": "/", "headers": [], "state": state} for _ in range(2)]

    async def send(message: Message) -> None:
        pass

    async def receive() -> Message:
        raise AssertionError

    for scope in scopes:
        # Without an end of the first one, the second body had no room.
        await middleware(scope, receive, send)
        assert scope["state"] == state == {"mine": 1}
    assert contexts[0] is not contexts[1]
    assert [context.body.size for context in contexts] == [0, 0]
