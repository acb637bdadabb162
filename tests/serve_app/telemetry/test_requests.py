"""What becomes of a request: its outcome, its metrics, its line, and the usage that nobody else sees."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route
from starlette.types import Message

from serve_app.api.scheduling import Scheduling
from serve_app.relay.usage import SCOPE_KEY, PromptUsage, RequestUsage
from serve_app.telemetry import catalogue
from serve_app.telemetry.accounts import MAX_PENDING, Account, Accounting, Accounts, account_of
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.request_log import RequestLog, as_text, fields
from serve_app.telemetry.requests import RequestMetrics
from tests.serve_app.telemetry.recording import Instruments

USAGE = RequestUsage()
USAGE.add(PromptUsage(submitted_at=1.0, started_at=1.5, ended_at=2.0, prompt_tokens=12, output_tokens=5))
SECRET = "the prompt"


async def answer(request: Request) -> Response:
    account_of(request.scope).assign("m", Scheduling(tenant="a"))
    status = int(request.query_params.get("status", 200))
    if status == 200:
        request.scope[SCOPE_KEY] = USAGE
    return Response(b"answer", status)


async def stream(request: Request) -> Response:
    account_of(request.scope).assign("m", Scheduling(tenant="a"))
    broken = "broken" in request.query_params

    async def pieces() -> AsyncIterator[bytes]:
        yield b"data: 1\n\n"
        if not broken:
            request.scope[SCOPE_KEY] = USAGE
        yield b"data: [DONE]\n\n"

    return StreamingResponse(pieces(), media_type="text/event-stream")


async def fail(request: Request) -> Response:
    raise RuntimeError(SECRET)


async def hang(request: Request) -> Response:
    account_of(request.scope).assign("m", Scheduling(tenant="a"))
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
]


class Front:
    """An application with an account of each request.

    Attributes:
        ended: The accounts.
        told: The metrics.
        begun: Set once a request has come.
    """

    def __init__(self) -> None:
        self.ended: list[Account] = []
        self.told = Instruments()
        self.begun = asyncio.Event()
        metrics = RequestMetrics(Meters(catalogue.INGRESS, self.told.make))
        self.accounts = Accounts([self.ended.extend, metrics], lambda account: self.begun.set())
        self.app = Accounting(Starlette(routes=ROUTES), self.accounts)

    async def ask(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(cast(Any, self.app), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            response = await client.request(method, path, **options)
        self.accounts()
        return response


@pytest.fixture
def front() -> Front:
    return Front()


async def test_a_receipt_is_taken_off_and_read(front: Front) -> None:
    response = await front.ask("POST", "/answer")
    assert response.content == b"answer"
    (account,) = front.ended
    assert account.usage
    assert (account.usage.prompt_tokens, account.usage.output_tokens) == (12, 5)
    assert (account.usage.wait_s, account.usage.engine_s) == (0.5, 1.0)
    assert front.told.total(catalogue.REQUESTS, "m", "ok", "200") == 1
    assert len(front.told.of(catalogue.REQUEST_SECONDS, "m", "no")) == 1
    assert front.told.of(catalogue.FIRST_TOKEN, "m") == []


async def test_a_stream_has_a_first_token_and_a_time_per_token(front: Front) -> None:
    response = await front.ask("POST", "/stream")
    assert response.content == b"data: 1\n\ndata: [DONE]\n\n"
    assert front.told.total(catalogue.REQUESTS, "m", "ok", "200") == 1
    assert len(front.told.of(catalogue.FIRST_TOKEN, "m")) == 1
    assert len(front.told.of(catalogue.PER_TOKEN, "m")) == 1
    assert front.told.of(catalogue.PATH_SECONDS, "m") == [0.0]


async def test_a_client_may_leave_when_it_has_the_last_event(front: Front) -> None:
    scope: dict[str, Any] = {"type": "http", "method": "POST", "path": "/stream", "query_string": b""}
    scope |= {"headers": [], "asgi": {"spec_version": "2.4"}}
    sent: list[bytes] = []

    async def receive() -> Message:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Message) -> None:
        sent.append(message.get("body", b""))
        if b"[DONE]" in sent[-1]:
            raise asyncio.CancelledError

    with pytest.raises(asyncio.CancelledError):
        await front.app(scope, receive, send)
    front.accounts()
    assert sent[1:] == [b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert front.told.total(catalogue.REQUESTS, "m", "ok", "200") == 1


async def test_a_stream_without_a_receipt_has_failed(front: Front) -> None:
    await front.ask("POST", "/stream?broken=1")
    assert front.told.total(catalogue.REQUESTS, "m", "failed", "200") == 1
    assert front.told.of(catalogue.FIRST_TOKEN, "m") == []


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, "refused"), (408, "expired"), (429, "rejected"), (503, "failed")]
)
async def test_a_status_is_an_outcome(front: Front, status: int, outcome: str) -> None:
    await front.ask("POST", f"/answer?status={status}")
    assert front.told.series(catalogue.REQUESTS) == {("m", outcome, str(status))}
    assert front.told.of(catalogue.REQUEST_SECONDS, "m", "no") == []


async def test_what_reaches_no_model_has_no_name_of_its_own(front: Front) -> None:
    await front.ask("GET", "/no/such/path")
    await front.ask("GET", "/fail")
    assert front.told.series(catalogue.REQUESTS) == {
        ("none", "refused", "404"),
        ("none", "failed", "500"),
    }


async def test_a_probe_is_not_told_of(front: Front) -> None:
    await front.ask("GET", "/health")
    assert front.told.series(catalogue.REQUESTS) == set()
    assert front.accounts.under_way == 0


async def test_a_client_that_leaves_cancels(front: Front) -> None:
    task = asyncio.ensure_future(front.ask("GET", "/hang"))
    await asyncio.wait_for(front.begun.wait(), 10)
    task.cancel()
    await asyncio.wait([task])
    front.accounts()
    assert front.told.series(catalogue.REQUESTS) == {("m", "cancelled", "0")}
    assert front.accounts.under_way == 0


async def test_what_waits_to_be_reported_is_bounded(front: Front) -> None:
    for _ in range(MAX_PENDING):
        front.accounts.close(front.accounts.open({"headers": [], "path": "/health", "method": "GET"}))
    assert len(front.ended) == MAX_PENDING


async def test_a_line_tells_all_but_what_was_said(front: Front, tmp_path: Path) -> None:
    log = RequestLog(tmp_path, "r1", "json")
    key = {"authorization": f"Bearer {SECRET}", "x-request-id": "id-1"}
    await front.ask("POST", f"/answer?q={SECRET}", content=SECRET, headers=key)
    await front.ask("GET", "/fail")
    await front.ask("GET", "/health")
    log(front.ended)
    log.close()
    text = (tmp_path / "requests_r1.log").read_text()
    assert SECRET not in text
    first, second = map(json.loads, text.splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first.pop("first_s") <= first.pop("total_s")
    assert first == {
        "request_id": "id-1",
        "method": "POST",
        "path": "/answer",
        "model": "m",
        "tenant": "a",
        "status": 200,
        "outcome": "ok",
        "stream": False,
        "prompt_tokens": 12,
        "output_tokens": 5,
        "wait_s": 0.5,
    }
    assert (second["model"], second["outcome"], second["status"]) == (None, "failed", 500)
    assert len(second["request_id"]) == 32


async def test_a_client_can_not_write_lines_of_its_own(front: Front) -> None:
    await front.ask("POST", "/answer%0Afake", headers={"x-request-id": "a\tb"})
    line = as_text(fields(front.ended[0], 0.0))
    assert "\n" not in line
    assert "\t" not in line
    # A path that is no route of ours may hold anything, a prompt too.
    assert "POST (no route)" in line
    assert "fake" not in line


async def test_a_line_for_people(front: Front) -> None:
    await front.ask("POST", "/stream", headers={"x-request-id": "id-1"})
    line = as_text(fields(front.ended[0], 0.0))
    assert " 200 ok        m, POST /stream, tenant a, 12 + 5 tokens, waited 0.500 s, first after 0." in line
    assert line.endswith(", id-1")
