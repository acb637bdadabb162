"""An application whose requests are tracked, and answers of every kind."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.scheduling import Scheduling
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware, context_of
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.request_tracker import RequestTracker, TrackedRequest
from serve_app.telemetry.requests import RequestMetrics
from serve_app.wire.usage import RequestUsage, Tokens, Usage
from tests.serve_app.telemetry.instruments import Instruments

USAGE = RequestUsage()
USAGE.add(Usage(1.0, 1.5, 2.0, Tokens(12, 0, 5)))
SECRET = "the prompt"


async def answer(request: Request) -> Response:
    context_of(request.scope).assign("m", Scheduling(tenant="a"))
    status = int(request.query_params.get("status", 200))
    if status == 200:
        context_of(request.scope).usage = USAGE
    if late := request.query_params.get("late"):
        return LateStatus(int(late))
    return Response(b"answer", status)


class LateStatus(Response):
    """An answer whose status is known after its head was sent."""

    def __init__(self, status: int) -> None:
        super().__init__(b"answer")
        self._status = status

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def set_status(message: Message) -> None:
            await send(message)
            context_of(scope).status = self._status

        await super().__call__(scope, receive, set_status)


async def stream(request: Request) -> Response:
    context_of(request.scope).assign("m", Scheduling(tenant="a"))
    broken = "broken" in request.query_params
    usage = RequestUsage.unpack(USAGE.pack())
    # An Engine says of a stream that it has ended with an error event.
    usage.outcome = "failed" if "failed" in request.query_params else "ok"

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        if not broken:
            context_of(request.scope).usage = usage
        yield b"data: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def fail(request: Request) -> Response:
    raise RuntimeError(SECRET)


async def hang(request: Request) -> Response:
    context_of(request.scope).assign("m", Scheduling(tenant="a"))
    await asyncio.Event().wait()
    return Response()


async def plain(request: Request) -> Response:
    return PlainTextResponse("ok")


ROUTES = [
    Route("/answer", answer, methods=["GET", "POST"]),
    Route("/stream", stream, methods=["POST"]),
    Route("/fail", fail),
    Route("/hang", hang),
    Route("/health", plain),
    Route("/files/{id}/content", plain),
    Route("/models/{model:path}", plain),
]


class Front:
    """The application.

    Attributes:
        ended: Requests that have ended.
        metrics: Their metrics.
        begun: Set once a request has arrived.
    """

    def __init__(self) -> None:
        self.ended: list[TrackedRequest] = []
        self.metrics = Instruments()
        self.begun = asyncio.Event()
        record = RequestMetrics(Meters(catalogue.INGRESS, self.metrics.make))
        self.tracker = RequestTracker([self.ended.extend, record], lambda request: self.begun.set())
        self.app = RequestMiddleware(Starlette(routes=ROUTES), self.tracker, BodyBudget(0))

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        """Send a request, and report it."""
        transport = httpx.ASGITransport(cast(Any, self.app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, **options)
        self.tracker()
        return response
