"""Answers to clients of HTTP/1.0 are whole and have their length."""

from collections.abc import AsyncIterator
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.types import Message

from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware
from serve_app.ingress.http10 import MAX_BYTES
from serve_app.telemetry.request_tracker import RequestTracker
from tests.serve_app.answers import END, message
from tests.serve_app.ingress.engine_doubles import CHAT, STREAM, Engine, answer, application, health

__all__ = ["health"]


PIECE = b"data: x\n\n".ljust(1 << 20)
LARGE = MAX_BYTES // len(PIECE) + 1
"""Pieces of an answer that is too large."""


async def events() -> AsyncIterator[bytes]:
    for number in range(3):
        yield b"data: %d\n\n" % number


async def app(scope: Any, receive: Any, send: Any) -> None:
    whole = Request(scope).url.path == "/whole"
    response: Response = JSONResponse({}) if whole else StreamingResponse(events(), headers={"x-mine": "1"})
    await response(scope, receive, send)


def around(app: Any, budget: BodyBudget | None = None) -> RequestMiddleware:
    return RequestMiddleware(app, RequestTracker([]), budget or BodyBudget(2 * MAX_BYTES))


async def call(app: Any, path: str, version: str, body: bytes = b"{}") -> list[Message]:
    """Return the messages of an answer."""
    sent: list[Message] = []
    received = [{"type": "http.request", "body": body, "more_body": False}]

    async def receive() -> Message:
        return received.pop() if received else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        sent.append(message)

    scope: Message = {
        "type": "http",
        "http_version": version,
        "method": "POST",
        "path": path,
        "query_string": b"",
        "root_path": "",
        "headers": [(b"host", b"x"), (b"content-type", b"application/json")],
        "asgi": {"version": "3.0", "spec_version": "2.4"},
    }
    await app(scope, receive, send)
    return sent


async def test_a_stream_is_one_body_with_its_length() -> None:
    start, body = await call(around(app), "/stream", "1.0")
    assert body["body"] == b"data: 0\n\ndata: 1\n\ndata: 2\n\n"
    assert not body.get("more_body")
    assert dict(start["headers"])[b"content-length"] == b"27"
    assert (start["status"], dict(start["headers"])[b"x-mine"]) == (200, b"1")


@pytest.mark.parametrize(("path", "version"), [("/stream", "1.1"), ("/whole", "1.0"), ("/stream", "2")])
async def test_other_answers_pass_as_they_are(path: str, version: str) -> None:
    assert await call(around(app), path, version) == await call(app, path, version)


async def test_an_answer_too_large_to_keep_says_so() -> None:
    async def large(scope: Any, receive: Any, send: Any) -> None:
        async def pieces() -> AsyncIterator[bytes]:
            for _ in range(LARGE):
                yield PIECE

        await StreamingResponse(pieces())(scope, receive, send)

    start, body = await call(around(large), "/stream", "1.0")
    assert start["status"] == 400
    assert b"use HTTP/1.1" in body["body"]


async def test_answers_that_are_kept_count_with_the_bodies_of_requests() -> None:
    for most, status in ((26, 503), (27, 200)):
        budget = BodyBudget(most)
        start, body = await call(around(app, budget), "/stream", "1.0")
        assert start["status"] == status
        assert (b"ingress.max_bytes_in_flight" in body["body"]) == (status == 503)
        assert budget.held == 0


async def test_the_ingress_keeps_no_more_of_answers_than_of_bodies() -> None:
    pieces = [message(head=STREAM, body=b"data: %d\n\n" % number) for number in range(99)]
    ingress = application({"demo": Engine(answer(*pieces, END))}, max_body_bytes=100, max_bytes_in_flight=200)
    start, _ = await call(ingress, CHAT, "1.0")
    assert start["status"] == 503


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_the_ingress_sends_a_stream_as_its_client_can_read_it(version: str) -> None:
    pieces = [message(head=STREAM, body=b"data: 1\n\n"), message(body=b"data: [DONE]\n\n"), END]
    start, *bodies = await call(application({"demo": Engine(answer(*pieces))}), CHAT, version)
    assert b"".join(each["body"] for each in bodies) == b"data: 1\n\ndata: [DONE]\n\n"
    assert (b"content-length" in dict(start["headers"])) == (version == "1.0")
    assert (len(bodies) == 1) == (version == "1.0")
