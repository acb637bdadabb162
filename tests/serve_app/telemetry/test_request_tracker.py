"""A request to the Ingress: its outcome and usage, its metrics, and its line in the log."""

import asyncio
from typing import Any

import pytest
from starlette.types import Message

from serve_app.telemetry import catalogue
from serve_app.telemetry.request_tracker import TrackedRequest
from tests.progress import STILL_S
from tests.serve_app.telemetry.front import Front


async def test_an_answer_has_its_usage_and_one_time(front: Front) -> None:
    response = await front.ask("POST", "/answer")
    assert response.content == b"answer"
    (request,) = front.ended
    assert request.usage
    assert request.usage.counted == (12, 0, 5)
    assert (request.usage.wait_s, request.usage.engine_s) == (0.5, 1.0)
    assert len(front.metrics.of(catalogue.REQUEST_SECONDS, "m", "no")) == 1
    assert front.metrics.of(catalogue.FIRST_TOKEN, "m") == []


async def test_a_stream_has_a_first_token_and_a_time_per_token(front: Front) -> None:
    response = await front.ask("POST", "/stream")
    assert response.content == b"data: 1\n\ndata: [DONE]\n\n"
    (request,) = front.ended
    assert (request.outcome, request.streams, request.complete) == ("ok", True, True)
    assert request.started_at <= request.first_at <= request.ended_at
    (whole,) = front.metrics.of(catalogue.REQUEST_SECONDS, "m", "yes")
    (first,) = front.metrics.of(catalogue.FIRST_TOKEN, "m")
    assert (whole, first) == (request.seconds, request.first_at - request.started_at)
    assert front.metrics.of(catalogue.PER_TOKEN, "m") == [pytest.approx((whole - first) / 4)]
    assert front.metrics.of(catalogue.PATH_SECONDS, "m") == [0.0]


@pytest.mark.parametrize(
    ("method", "path", "status", "outcome", "series"),
    [
        ("POST", "/answer", 200, "ok", ("m", "ok", "200")),
        ("POST", "/stream", 200, "ok", ("m", "ok", "200")),
        ("POST", "/stream?broken=1", 200, "failed", ("m", "failed", "200")),
        # The error event of a stream.
        ("POST", "/stream?failed=1", 200, "failed", ("m", "failed", "200")),
        ("POST", "/answer?status=400", 400, "refused", ("m", "refused", "400")),
        ("POST", "/answer?status=408", 408, "expired", ("m", "expired", "408")),
        ("POST", "/answer?status=429", 429, "rejected", ("m", "rejected", "429")),
        ("POST", "/answer?status=503", 503, "failed", ("m", "failed", "503")),
        # The status is known after the head of the answer.
        ("POST", "/answer?late=503", 503, "failed", ("m", "failed", "503")),
        ("GET", "/fail", 500, "failed", ("none", "failed", "500")),
        ("GET", "/no/such/path", 404, "refused", ("none", "refused", "404")),
        ("POST", "/health", 405, "refused", ("none", "refused", "405")),
        # A probe that succeeds is not counted.
        ("GET", "/health", 200, "ok", None),
    ],
)
async def test_a_request_is_counted_by_its_outcome_and_status(
    front: Front, method: str, path: str, status: int, outcome: str, series: tuple[str, ...] | None
) -> None:
    await front.ask(method, path)
    (request,) = front.ended
    assert (request.status, request.outcome, request.reportable) == (status, outcome, series is not None)
    assert front.metrics.series(catalogue.REQUESTS) == ({series} if series else set())
    # Times of failed requests would distort the times of answers.
    timed = outcome == "ok" and request.model == "m"
    times = front.metrics.series(catalogue.REQUEST_SECONDS) | front.metrics.series(catalogue.FIRST_TOKEN)
    assert bool(times) == timed


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


async def test_a_client_that_leaves_cancels(front: Front) -> None:
    task = asyncio.ensure_future(front.ask("GET", "/hang"))
    await asyncio.wait_for(front.begun.wait(), STILL_S)
    assert front.tracker.under_way == 1
    task.cancel()
    await asyncio.wait([task])
    front.tracker()
    assert [(request.model, request.outcome) for request in front.ended] == [("m", "cancelled")]
    assert front.metrics.series(catalogue.REQUESTS) == {("m", "cancelled", "0")}
    assert front.tracker.under_way == 0


async def test_the_requests_that_await_their_report_are_bounded(front: Front) -> None:
    for _ in range(2_000):
        request = TrackedRequest({"headers": [], "path": "/health", "method": "GET"})
        front.tracker.open(request)
        front.tracker.close(request)
    assert len(front.ended) == 2_000
