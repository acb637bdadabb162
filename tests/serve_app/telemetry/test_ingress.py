"""Log and spans of an Ingress replica."""

import json
import logging
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from serve_app.api.headers import Headers
from serve_app.api.scheduling import Scheduling
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.settings.telemetry import SILENT, TelemetrySettings, TraceSettings
from serve_app.telemetry.ingress import IngressTelemetry


async def headers_for_the_engine(telemetry: IngressTelemetry) -> Headers:
    """Send one request through an application with this telemetry, until it has ended."""
    found: Headers = []

    async def answer(request: Request) -> Response:
        found.extend(telemetry.assign(context_of(request.scope), "m", Scheduling(tenant="a"), [(b"x", b"y")]))
        return PlainTextResponse("ok")

    tracked = Middleware(RequestMiddleware, telemetry.tracker, BodyBudget(0))
    app = Starlette(routes=[Route("/answer", answer)], middleware=[tracked])
    async with telemetry.lifespan(app):
        transport = httpx.ASGITransport(cast(Any, app))
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            assert (await client.get("/answer")).text == "ok"
    return found


async def test_a_request_has_a_line_and_a_span_and_its_context_goes_to_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Ray Serve's log may stand behind a buffer.
    log = MemoryHandler(10, target=logging.FileHandler(tmp_path / "replica.log"))
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [logging.StreamHandler(), log])
    traces = TraceSettings(endpoint=f"file://{tmp_path}/spans")
    headers = dict(await headers_for_the_engine(IngressTelemetry(TelemetrySettings(traces=traces), "r1")))
    (line,) = map(json.loads, (tmp_path / "requests_r1.log").read_text().splitlines())
    assert (line["path"], line["model"], line["tenant"], line["status"]) == ("/answer", "m", "a", 200)
    (file,) = (tmp_path / "spans").iterdir()
    (span,) = map(json.loads, file.read_text().splitlines())
    assert span["name"] == "GET /answer"
    assert headers[b"x"] == b"y"
    assert headers[b"traceparent"].decode().split("-")[1] == line["trace_id"]


async def test_without_telemetry_headers_pass_unchanged() -> None:
    assert await headers_for_the_engine(IngressTelemetry(SILENT, "r1")) == [(b"x", b"y")]


async def test_there_is_no_log_where_ray_serve_writes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("ray.serve"), "handlers", [])
    settings = TelemetrySettings(metrics=False, request_log="text")
    assert await headers_for_the_engine(IngressTelemetry(settings, "r1")) == [(b"x", b"y")]
