"""Bodies are read within bounds; what is held of them is counted, and given back however a request ends."""

import asyncio
import json
import threading
import time
import tracemalloc
import weakref
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response
from serve_app.ingress.body import (
    BodyBudget,
    look,
    read_body,
    small_body,
)
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
from tests.serve_app.inspected import inspect

__all__ = ["health"]

SMALL = 64 * 1024
"""Bytes of a body for which room is kept."""

LARGE_BYTES = 1 << 18
"""Bytes of the largest body that is looked into on the event loop."""

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
        budget = BodyBudget(LIMITS.bytes_in_flight)
        await RequestMiddleware(app, RequestTracker([]), budget)(scope, receive, unused)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 4 * size


# Bodies that are small by their nature


def request(*messages: Message, **headers: str) -> Request:
    """Return a request whose client sends these messages, and then nothing."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    raw = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "method": "POST", "path": "/", "headers": raw}, receive)


def piece(data: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


@given(st.lists(st.binary(max_size=5), max_size=5), st.integers(0, 12))
async def test_the_pieces_of_a_body_are_joined_or_are_too_many(pieces: list[bytes], most: int) -> None:
    sent = request(*map(piece, pieces), piece(b"", more=False))
    body = b"".join(pieces)
    if len(body) <= most:
        assert await small_body(sent, most) == body.removeprefix(b"\xef\xbb\xbf")
    else:
        with pytest.raises(RequestError) as caught:
            await small_body(sent, most)
        assert caught.value.status == 413


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert await small_body(request(piece(b"\xef"), piece(b"\xbb\xbf{}", more=False)), 5) == b"{}"


@pytest.mark.parametrize(
    ("messages", "headers", "status"),
    [
        ((), {"content_length": "5"}, 413),
        ((piece(b"ab"), {"type": "http.disconnect"}), {}, 400),
        ((piece(b"ab"),), {}, 408),
        ((), {"content_encoding": "gzip"}, 415),
    ],
    ids=["too large", "ends early", "too slow", "encoded"],
)
async def test_a_body_that_does_not_come_is_refused(
    messages: tuple[Message, ...], headers: dict[str, str], status: int
) -> None:
    with pytest.raises(RequestError) as caught:
        await small_body(request(*messages, **headers), 4, 0.01 if status == 408 else LIMIT_S)
    assert caught.value.status == status
    if status == 415:
        assert caught.value.param == "content-encoding"


async def test_a_small_body_counts_for_the_budget_where_there_is_one() -> None:
    budget = BodyBudget(SMALL)
    sent = request(piece(b"x" * 100), piece(b"x" * SMALL))

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        with pytest.raises(RequestError, match="Try again") as caught:
            await small_body(Request(scope, receive), 2 * SMALL)
        assert caught.value.status == 503
        assert budget.held == 100

    async def unused(message: Message) -> None:
        raise AssertionError

    await RequestMiddleware(app, RequestTracker([]), budget)(sent.scope, sent.receive, unused)
    assert budget.held == 0


# Large bodies are looked into beside the event loop


async def test_a_small_body_is_looked_into_at_once() -> None:
    assert await look(LARGE_BYTES, threading.get_ident) == threading.get_ident()


async def test_large_bodies_take_turns_and_leave_the_loop_alone() -> None:
    free, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    inside: list[int] = []
    most = 0

    def call() -> int:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        loop.call_soon_threadsafe(entered.set)
        assert free.wait(LIMIT_S)
        inside.pop()
        return threading.get_ident()

    async with asyncio.timeout(LIMIT_S):
        calls = [asyncio.ensure_future(look(LARGE_BYTES + 1, call)) for _ in range(3)]
        # The loop turns while the first one is looked into.
        await entered.wait()
        free.set()
        assert threading.get_ident() not in await asyncio.gather(*calls)
    assert most == 1


async def test_a_body_whose_client_leaves_is_not_kept_until_its_turn_comes() -> None:
    free, entered = threading.Event(), threading.Event()

    class Body:
        """A body whose end can be seen."""

        def look(self) -> None:
            raise AssertionError

    def hold() -> None:
        entered.set()
        assert free.wait(LIMIT_S)

    async with asyncio.timeout(LIMIT_S):
        first = asyncio.ensure_future(look(LARGE_BYTES + 1, hold))
        assert await asyncio.to_thread(entered.wait, LIMIT_S)
        body = Body()
        kept = weakref.ref(body)
        call = asyncio.ensure_future(look(LARGE_BYTES + 1, body.look))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        del body, call
        try:
            assert kept() is None
        finally:
            free.set()
            await first


async def test_an_error_of_the_look_is_the_caller_s() -> None:
    with pytest.raises(ZeroDivisionError):
        await look(LARGE_BYTES + 1, lambda: 1 // 0)


def cpu_s(call: Callable[[], object]) -> float:
    """Return the least seconds of this process that a call takes."""
    found = []
    for _ in range(5):
        began = time.process_time()
        with suppress(RequestError):
            call()
        found.append(time.process_time() - began)
    return min(found)


@pytest.mark.parametrize(
    ("head", "unit", "end"),
    [
        (b'{"messages": [{"role": "user", "content": "', b'Well, \\"it\\" is.\\n', b'"}]}'),
        (b'{"messages": [{"role": "user", "content": "', b"\\ud83d\\ude00", b'"}]}'),
        (b'{"messages": [', b'{"role": "user"}, ', b"{}]}"),
        (b'{"messages": [', b'{"role": "user"}, ', b'{"role": ""}]}'),
        (b'{"messages": [', b"[], ", b"[]]}"),
        (b'{"messages": [', b"NaN, ", b"1]}"),
        (b'{"prompt": [', b'"a", ', b'"a"]}'),
        (b'{"prompt": [', b"1,", b"1]}"),
        (b"{", b'"f%d": NaN, ', b'"n": 1}'),
    ],
    ids=["text", "escapes", "no role", "messages", "lists", "NaN", "prompts", "tokens", "fields"],
)
def test_a_look_holds_the_loop_for_no_longer_than_a_parser(head: bytes, unit: bytes, end: bytes) -> None:
    units = [unit % i if b"%" in unit else unit for i in range(LARGE_BYTES // len(unit))]
    body = head + b"".join(units) + end
    control = json.dumps({"prompt": [{}] * (LARGE_BYTES // 3)})
    took = cpu_s(lambda: inspect(body, "/v1/completions", LIMITS))
    # Parsing the control takes two milliseconds.
    assert took < 8 * cpu_s(lambda: json.loads(control))
