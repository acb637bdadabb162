"""The outcome of a request, and its usage."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from serve_app.telemetry.request_tracker import MAX_PENDING, TrackedRequest
from tests.progress import STILL_S
from tests.serve_app.telemetry.front import Front


async def test_an_answer_has_its_usage(front: Front) -> None:
    response = await front.ask("POST", "/answer")
    assert response.content == b"answer"
    (request,) = front.ended
    assert request.usage
    assert (request.usage.prompt_tokens, request.usage.output_tokens) == (12, 5)
    assert (request.usage.wait_s, request.usage.engine_s) == (0.5, 1.0)


async def test_a_stream_has_its_times(front: Front) -> None:
    response = await front.ask("POST", "/stream")
    assert response.content == b"data: 1\n\ndata: [DONE]\n\n"
    (request,) = front.ended
    assert (request.outcome, request.streams, request.complete) == ("ok", True, True)
    assert request.started_at <= request.first_at <= request.ended_at


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
    front.tracker()
    assert sent[1:] == [b"data: 1\n\n", b"data: [DONE]\n\n"]
    assert [request.outcome for request in front.ended] == ["ok"]


@pytest.mark.parametrize("end", ["broken", "failed"])
async def test_a_stream_without_usage_or_with_an_error_event_has_failed(front: Front, end: str) -> None:
    await front.ask("POST", f"/stream?{end}=1")
    assert [request.outcome for request in front.ended] == ["failed"]


@pytest.mark.parametrize(
    ("status", "outcome"), [(400, "refused"), (408, "expired"), (429, "rejected"), (503, "failed")]
)
async def test_the_status_of_an_error_is_its_outcome(front: Front, status: int, outcome: str) -> None:
    await front.ask("POST", f"/answer?status={status}")
    assert [(request.status, request.outcome) for request in front.ended] == [(status, outcome)]


async def test_the_status_of_an_answer_that_began_before_it_was_known(front: Front) -> None:
    response = await front.ask("POST", "/answer?late=503")
    assert response.status_code == 200
    assert [(request.status, request.outcome) for request in front.ended] == [(503, "failed")]


async def test_a_client_that_leaves_cancels(front: Front) -> None:
    task = asyncio.ensure_future(front.ask("GET", "/hang"))
    await asyncio.wait_for(front.begun.wait(), STILL_S)
    assert front.tracker.under_way == 1
    task.cancel()
    await asyncio.wait([task])
    front.tracker()
    assert [(request.model, request.outcome) for request in front.ended] == [("m", "cancelled")]
    assert front.tracker.under_way == 0


@pytest.mark.parametrize(
    ("method", "path", "reportable"),
    [
        ("GET", "/health", False),
        ("GET", "/no/such/path", True),
        ("GET", "/fail", True),
        ("POST", "/answer", True),
        ("POST", "/health", True),
    ],
)
async def test_only_probes_that_succeed_are_not_reportable(
    front: Front, method: str, path: str, reportable: bool
) -> None:
    await front.ask(method, path)
    assert [request.reportable for request in front.ended] == [reportable]


async def test_the_requests_that_await_their_report_are_bounded(front: Front) -> None:
    for _ in range(MAX_PENDING):
        request = TrackedRequest({"headers": [], "path": "/health", "method": "GET"})
        front.tracker.open(request)
        front.tracker.close(request)
    assert len(front.ended) == MAX_PENDING
