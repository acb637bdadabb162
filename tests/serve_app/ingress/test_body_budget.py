"""The bound on the bytes of all bodies: what is held is counted, and given back however a request ends."""

import asyncio
import tracemalloc
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response
from serve_app.ingress.body import read_body
from serve_app.ingress.body_budget import SMALL, BodyBudget
from serve_app.ingress.context import RequestMiddleware
from serve_app.settings.ingress import IngressSettings
from serve_app.telemetry.request_tracker import RequestTracker
from tests.serve_app.ingress.engine_doubles import (
    CHAT,
    LIMIT_S,
    Call,
    Engine,
    application,
    health,
)

__all__ = ["health"]

LARGE = 4 * SMALL
LIMITS = IngressSettings(max_body_bytes=LARGE, max_bytes_in_flight=4 * LARGE, body_timeout_s=LIMIT_S)


async def endpoint(scope: Scope, receive: Receive, send: Send) -> None:
    """Read a body and answer when it is told to: with a failure, if the message says so."""
    try:
        await read_body(Request(scope, receive), LIMITS)
    except RequestError as error:
        await error_response(error, scope["path"])(scope, receive, send)
        return
    message = await receive()
    if message["type"] == "fail":
        raise RuntimeError("failed")
    await Response()(scope, receive, send)


class RawCall:
    """One request, of which the test sends each message.

    Attributes:
        status: Status of the answer; 0: there is none yet.
        size: Bytes that the application has taken.
    """

    def __init__(self, budget: BodyBudget, length: int | None) -> None:
        self.status = 0
        self.size = 0
        self._messages: asyncio.Queue[Message] = asyncio.Queue()
        self._waits = asyncio.Event()
        headers = [] if length is None else [(b"content-length", str(length).encode())]
        scope: Message = {"type": "http", "method": "POST", "path": "/", "headers": headers}
        self.task = asyncio.ensure_future(
            RequestMiddleware(endpoint, RequestTracker([]), budget)(scope, self._receive, self._send)
        )
        self.task.add_done_callback(lambda _: self._waits.set())

    async def _receive(self) -> Message:
        self._waits.set()
        message = await self._messages.get()
        self.size += len(message.get("body", b""))
        return message

    async def _send(self, message: Message) -> None:
        self.status = message.get("status", self.status)

    async def settle(self) -> None:
        """Wait until the application wants a message or has ended."""
        async with asyncio.timeout(LIMIT_S):
            await self._waits.wait()

    async def tell(self, type: str, **message: Any) -> None:
        """Send one message, and wait until the application wants the next one or has ended."""
        await self.settle()
        if self.task.done():
            return
        self._waits.clear()
        self._messages.put_nowait({"type": type, **message})
        await self.settle()

    async def piece(self, size: int, last: bool) -> None:
        await self.tell("http.request", body=b"x" * size, more_body=not last)

    async def cancel(self) -> None:
        self.task.cancel()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.wait({self.task})

    @property
    def holds(self) -> int:
        return 0 if self.task.done() else self.size


ENDS = ["answer", "fail", "leave", "cancel"]
PIECES = st.lists(st.integers(1, LARGE // 2), min_size=1, max_size=4)
PLANS = st.tuples(PIECES, st.booleans(), st.sampled_from(ENDS))


async def _run(plans: Sequence[tuple[list[int], bool, str]], order: Sequence[int]) -> None:
    budget = BodyBudget(LIMITS.bytes_in_flight)
    calls = [RawCall(budget, sum(pieces) if known else None) for pieces, known, _ in plans]
    left = [list(pieces) for pieces, _, _ in plans]
    for call in calls:
        await call.settle()
    for at in order:
        call, pieces, end = calls[at % len(calls)], left[at % len(calls)], plans[at % len(calls)][2]
        if pieces:
            size = pieces.pop(0)
            if end == "leave" and not pieces:
                await call.tell("http.disconnect")
            else:
                await call.piece(size, last=not pieces)
        elif end == "cancel":
            await call.cancel()
        else:
            await call.tell(end)
        assert budget.held == sum(call.holds for call in calls) <= LIMITS.bytes_in_flight
    for call in calls:
        await call.cancel()
        if not call.task.cancelled():
            # A failure of the endpoint is the test's own.
            call.task.exception()
    assert budget.held == 0


@settings(max_examples=150, deadline=None)
@given(st.lists(PLANS, min_size=1, max_size=12), st.lists(st.integers(0, 11), max_size=60))
def test_what_is_held_is_what_live_requests_have_sent(
    plans: list[tuple[list[int], bool, str]], order: list[int]
) -> None:
    asyncio.run(_run(plans, order))


async def filled(budget: BodyBudget) -> list[RawCall]:
    """Fill the part of a budget that large bodies may use."""
    calls = []
    while size := min(LARGE, LIMITS.bytes_in_flight * 7 // 8 - budget.held):
        call = RawCall(budget, size)
        await call.piece(size, last=True)
        assert not call.task.done()
        calls.append(call)
    return calls


async def test_a_body_without_room_is_refused_by_its_length_before_it_is_read() -> None:
    budget = BodyBudget(LIMITS.bytes_in_flight)
    calls = await filled(budget)
    late = RawCall(budget, LARGE)
    await late.settle()
    assert (late.task.done(), late.status, late.size) == (True, 503, 0)
    await calls.pop(0).tell("answer")
    again = RawCall(budget, LARGE)
    await again.piece(LARGE, last=True)
    assert again.status == 0
    for call in (*calls, again):
        await call.tell("answer")
        assert call.status == 200
    assert budget.held == 0


async def test_a_body_of_unknown_length_is_refused_where_the_room_ends() -> None:
    budget = BodyBudget(LIMITS.bytes_in_flight)
    calls = await filled(budget)
    before = budget.held
    late = RawCall(budget, None)
    sent = 0
    while not late.task.done():
        await late.piece(SMALL, last=False)
        sent += SMALL
    assert late.status == 503
    assert sent <= LARGE
    assert budget.held == before
    for call in calls:
        await call.cancel()


async def test_large_bodies_do_not_keep_out_small_ones() -> None:
    budget = BodyBudget(LIMITS.bytes_in_flight)
    calls = await filled(budget)
    for length in (100, None):
        small = RawCall(budget, length)
        await small.piece(100, last=True)
        await small.tell("answer")
        assert small.status == 200
    for call in calls:
        await call.cancel()


async def test_a_client_that_announces_bytes_and_does_not_send_them_keeps_nobody_out() -> None:
    budget = BodyBudget(LIMITS.bytes_in_flight)
    slow = [RawCall(budget, LARGE) for _ in range(100)]
    for each in slow:
        await each.settle()
    call = RawCall(budget, LARGE)
    await call.piece(LARGE, last=True)
    await call.tell("answer")
    assert call.status == 200
    for each in slow:
        await each.cancel()
    assert budget.held == 0


@pytest.mark.parametrize("path", [CHAT, "/generate", "/process", "/v1/audio/transcriptions"])
async def test_a_full_budget_is_a_503_with_the_time_to_wait(path: str) -> None:
    """Bodies are held until their answers end: the Ingress may have to send them again."""
    engines = {"demo": Engine(_never), "rank": Engine(_never)}
    app = application(engines, max_body_bytes=1000, max_bytes_in_flight=2000)
    body = b'{"prompts": ["x"], "records": ["x"], "model": "%s"}'
    body = (body % (b"rank" if path == "/process" else b"demo")).ljust(1000)
    engine = engines["rank" if path == "/process" else "demo"]
    calls = [Call(app, path, body) for _ in range(2)]
    await _asked(engine, 2)
    late = Call(app, path, body)
    start = await late.next()
    assert start["status"] == 503
    assert dict(start["headers"])[b"retry-after"] == b"1"
    assert b"ingress.max_bytes_in_flight" in (await late.next())["body"]
    for call in calls:
        await call.leave()
    again = Call(app, path, body)
    await _asked(engine, 3)
    await again.leave()


async def _asked(engine: Engine, times: int) -> None:
    async with asyncio.timeout(LIMIT_S):
        while len(engine.requests) < times:
            engine.asked.clear()
            await engine.asked.wait()


async def _never(request: Any) -> Any:
    await asyncio.Event().wait()
    yield b""


async def test_a_body_in_tiny_pieces_takes_no_more_memory_than_its_bytes() -> None:
    left = size = 100_000

    async def receive() -> Message:
        nonlocal left
        left -= 2
        return {"type": "http.request", "body": bytes(bytearray(2)), "more_body": left > 0}

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        assert len(await read_body(Request(scope, receive), LIMITS)) == size

    async def unused(message: Message) -> None:
        raise AssertionError

    scope: Message = {"type": "http", "method": "POST", "path": "/", "headers": []}
    tracemalloc.start()
    try:
        await RequestMiddleware(app, RequestTracker([]), BodyBudget(LIMITS.bytes_in_flight))(
            scope, receive, unused
        )
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * size
