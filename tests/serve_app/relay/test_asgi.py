"""Both ends of the relay: the bytes that an application sends are the bytes that arrive, in order."""

import asyncio
import gc
from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing
from typing import Any, TypeVar
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Send

from serve_app.api.errors import RequestError
from serve_app.relay import asgi
from serve_app.relay.events import DONE, error_event
from serve_app.relay.frame import Head, Piece, pack_error, unpack
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage, Tokens
from tests.progress import STILL_S

T = TypeVar("T")
USAGE = RequestUsage(Tokens(3, 0, 4))

REQUEST = RelayRequest("POST", "/v1/x", b"a=1&b=%20", [(b"accept", b"*/*"), (b"x", b"\xff")], b"question")
HEADERS = [(b"content-type", b"text/event-stream; charset=utf-8")]
START: Message = {"type": "http.response.start", "status": 200, "headers": HEADERS}
END: Message = {"type": "http.response.body", "body": b"", "more_body": False}
FULL = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
LIMIT_S = STILL_S
"""No wait in these tests comes near it."""


def piece(body: bytes) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def settle() -> None:
    """Let every task run until it waits for something that only the test can bring about."""
    for _ in range(20):
        await asyncio.sleep(0)


async def soon(awaitable: Awaitable[T]) -> T:
    async with asyncio.timeout(LIMIT_S):
        return await awaitable


def run_app(app: Any, request: RelayRequest, **options: Any) -> AsyncGenerator[bytes, None]:
    return asgi.run_app(app, request, **({"usage": USAGE} | options))


async def rest(messages: AsyncGenerator[bytes, None]) -> list[Piece]:
    async with asyncio.timeout(LIMIT_S):
        return [unpack(message) async for message in messages]


async def next_piece(messages: AsyncGenerator[bytes, None]) -> Piece:
    async with asyncio.timeout(LIMIT_S):
        return unpack(await anext(messages))


def joined(pieces: list[Piece]) -> bytes:
    return b"".join(piece.body for piece in pieces)


class App:
    """An application that sends what the test gives it, when the test gives it.

    Attributes:
        sent: Messages whose `send` has returned.
        events: What happened to it otherwise: "cancelled", "cleaned up".
        ended: Set once it has ended.
    """

    def __init__(self, *messages: Message | Exception | None) -> None:
        self.sent = 0
        self.events: list[str] = []
        self.ended = asyncio.Event()
        self._script: asyncio.Queue[Message | Exception | None] = asyncio.Queue()
        self.give(*messages)

    def give(self, *messages: Message | Exception | None) -> None:
        """Have it send messages; an exception makes it raise, None makes it return."""
        for message in messages:
            self._script.put_nowait(message)

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        try:
            while (message := await self._script.get()) is not None:
                if isinstance(message, Exception):
                    raise message
                await send(message)
                self.sent += 1
        except asyncio.CancelledError:
            self.events.append("cancelled")
            raise
        finally:
            self.events.append("cleaned up")
            self.ended.set()


@pytest.fixture(autouse=True)
def leave_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give an application that doesn't listen little time to leave."""
    monkeypatch.setattr(asgi, "LEAVE_S", 0.01)


async def test_the_reader_gets_head_and_first_piece_and_then_the_rest() -> None:
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    assert await next_piece(messages) == Piece(Head(200, HEADERS), b"a")
    app.give(END, None)
    assert await rest(messages) == [Piece(usage=USAGE)]


# The request in the application


async def test_the_application_gets_the_request() -> None:
    seen: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.extend([scope, await receive()])
        await send(START)
        await send(END)

    await rest(run_app(app, REQUEST))
    scope, body = seen
    assert scope["type"] == "http"
    assert scope["method"] == "POST"
    assert scope["path"] == "/v1/x"
    assert scope["query_string"] == b"a=1&b=%20"
    assert scope["headers"] == [(b"accept", b"*/*"), (b"x", b"\xff")]
    assert body == {"type": "http.request", "body": b"question", "more_body": False}


async def test_two_requests_do_not_share_their_state() -> None:
    states: list[dict[str, Any]] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        scope["state"]["mine"] = True
        states.append(scope["state"])
        await send(START)
        await send(END)

    for _ in range(2):
        await rest(run_app(app, REQUEST))
    assert states[0] is not states[1]


# Pieces


@given(
    bodies=st.lists(st.binary(max_size=8), max_size=12),
    last=st.binary(max_size=8),
    app_yields=st.lists(st.integers(0, 4), min_size=1, max_size=5),
    reader_yields=st.lists(st.integers(0, 6), min_size=1, max_size=5),
    buffer=st.sampled_from([0, 3, 1 << 20]),
)
def test_the_same_bytes_arrive_in_order_at_any_pace_of_the_reader(
    bodies: list[bytes],
    last: bytes,
    app_yields: list[int],
    reader_yields: list[int],
    buffer: int,
) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(START)
        for i, body in enumerate(bodies):
            await give_way(app_yields, i)
            await send(piece(body))
        await send({"type": "http.response.body", "body": last})

    async def give_way(yields: list[int], i: int) -> None:
        for _ in range(yields[i % len(yields)]):
            await asyncio.sleep(0)

    async def read() -> list[bytes]:
        received = []
        async for message in run_app(app, REQUEST):
            received.append(message)
            await give_way(reader_yields, len(received))
        return received

    async def limited() -> list[bytes]:
        return await soon(read())

    with mock.patch.object(asgi, "MAX_BUFFERED_BYTES", buffer):
        received = asyncio.run(limited())
    pieces = [unpack(message) for message in received]
    assert joined(pieces) == b"".join(bodies) + last
    assert [piece.head for piece in pieces] == [Head(200, HEADERS)] + [None] * (len(pieces) - 1)
    assert [piece.usage for piece in pieces] == [None] * (len(pieces) - 1) + [USAGE]
    assert all(piece.body for piece in pieces[1:-1]), "an empty message carries nothing"


async def test_the_first_piece_leaves_at_once_though_more_is_to_come() -> None:
    app = App(START, piece(b"a"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        assert (await next_piece(messages)).body == b"a"


async def test_a_later_piece_leaves_at_once_where_nothing_else_is_sent() -> None:
    app = App(START, piece(b"a"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        await soon(anext(messages))
        for body in (b"b", b"c"):
            app.give(piece(body))
            assert await next_piece(messages) == Piece(body=body)


async def test_pieces_pile_up_while_the_reader_is_busy_and_travel_together() -> None:
    app = App(START, piece(b"a"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        await soon(anext(messages))
        app.give(piece(b"b"), piece(b"c"), piece(b""), piece(b"d"))
        await settle()
        assert app.sent == 6
        assert await next_piece(messages) == Piece(body=b"bcd")


async def test_the_event_that_has_clients_leave_travels_with_the_end() -> None:
    app = App(START, piece(b"a"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        await soon(anext(messages))
        app.give(piece(b"b"))
        await settle()
        app.give(piece(DONE))
        last = asyncio.ensure_future(next_piece(messages))
        await settle()
        assert not last.done()
        app.give(END)
        assert await soon(last) == Piece(body=b"b" + DONE, usage=USAGE)
        app.give(None)


async def test_that_event_waits_for_the_end_where_the_application_waits_for_room_too() -> None:
    app = App(START, piece(b"a"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        await soon(anext(messages))
        body = b"b" * asgi.MAX_BUFFERED_BYTES
        app.give(piece(body + DONE), END, None)
        assert await next_piece(messages) == Piece(body=body)
        assert await rest(messages) == [Piece(body=DONE, usage=USAGE)]


async def test_an_application_that_fails_after_that_event_has_answered() -> None:
    app = App(START, piece(DONE), ValueError("late"))
    async with aclosing(run_app(app, REQUEST)) as messages:
        assert await rest(messages) == [Piece(Head(200, HEADERS), DONE, usage=USAGE)]


async def test_a_whole_answer_that_is_there_at_once_is_one_message() -> None:
    app = App(START, piece(b"a"), piece(b"b"), {"type": "http.response.body", "body": b"c"}, None)
    assert await rest(run_app(app, REQUEST)) == [Piece(Head(200, HEADERS), b"abc", usage=USAGE)]


async def test_an_answer_without_a_body() -> None:
    app = App({"type": "http.response.start", "status": 204}, {"type": "http.response.body"}, None)
    assert await rest(run_app(app, REQUEST)) == [Piece(Head(204, []), usage=USAGE)]


async def test_an_application_may_work_on_after_its_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "LEAVE_S", 0.0)
    app = App(START, {"type": "http.response.body", "body": b"a"})
    assert len(await rest(run_app(app, REQUEST))) == 1
    await settle()
    assert app.events == []
    app.give(None)
    await soon(app.ended.wait())
    assert app.events == ["cleaned up"]


# Refusals


async def test_a_refusal_takes_the_place_of_a_head_that_says_all_is_well() -> None:
    app = App(START, piece(b'data: {"error": ...}'))
    assert await rest(run_app(app, REQUEST, refusal=lambda: FULL)) == [unpack(pack_error(FULL))]
    await soon(app.ended.wait())


async def test_a_refusal_takes_the_place_of_an_application_s_own_failure() -> None:
    app = App(RuntimeError("refused"))
    assert await rest(run_app(app, REQUEST, refusal=lambda: FULL)) == [unpack(pack_error(FULL))]


async def test_a_refusal_is_asked_for_when_the_answer_is_there_and_not_before() -> None:
    verdict: list[RequestError] = []
    app = App()
    messages = run_app(app, REQUEST, refusal=lambda: verdict[0] if verdict else None)
    first = asyncio.ensure_future(anext(messages))
    await settle()
    verdict.append(FULL)
    app.give(START, piece(b"x"))
    assert await soon(first) == pack_error(FULL)
    await messages.aclose()


@pytest.mark.parametrize("end", [(piece(b"its own event"), END, None), (ValueError("broken"),)])
async def test_a_refusal_after_the_head_has_left_is_the_last_event_of_the_stream(
    end: tuple[Any, ...],
) -> None:
    verdict: list[RequestError] = []
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST, refusal=lambda: verdict[0] if verdict else None)
    await soon(anext(messages))
    app.give(piece(b"b"))
    await settle()
    verdict.append(FULL)
    app.give(*end)
    pieces = await rest(messages)
    assert joined(pieces) == b"b" + error_event(FULL, REQUEST.path)
    assert pieces[-1].usage is not None
    assert pieces[-1].usage.outcome == "failed"


# An application that fails


async def test_an_application_that_fails_before_its_head_fails_the_answer_with_its_own_error() -> None:
    with pytest.raises(ValueError, match="broken"):
        await rest(run_app(App(ValueError("broken")), REQUEST))


async def test_an_application_that_sends_nothing_fails_the_answer() -> None:
    with pytest.raises(RuntimeError, match="no answer"):
        await rest(run_app(App(None), REQUEST))


@pytest.mark.parametrize("end", [ValueError("broken"), None], ids=["raises", "returns"])
async def test_an_application_that_ends_between_head_and_body_fails_the_answer(end: Exception | None) -> None:
    with pytest.raises((ValueError, RuntimeError), match=r"broken|no answer"):
        await rest(run_app(App(START, end), REQUEST))


@pytest.mark.parametrize("end", [ValueError("broken"), None], ids=["raises", "returns"])
@pytest.mark.parametrize("reader", ["waits", "is busy"])
async def test_an_application_that_breaks_off_fails_the_answer_where_it_was(
    end: Exception | None, reader: str
) -> None:
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    assert (await next_piece(messages)).body == b"a"
    app.give(end)
    if reader == "is busy":
        await soon(app.ended.wait())
        await settle()
    with pytest.raises((ValueError, RuntimeError), match="broke"):
        await soon(anext(messages))


async def test_an_error_after_the_last_piece_is_not_the_answer_s() -> None:
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    app.give(END, RuntimeError("in a background task"))
    assert await rest(messages) == [Piece(usage=USAGE)]
    await soon(app.ended.wait())


# A client that leaves


async def test_an_application_that_does_not_listen_is_cancelled_and_its_cleanup_runs() -> None:
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    await messages.aclose()
    await soon(app.ended.wait())
    assert app.events == ["cancelled", "cleaned up"]


async def test_a_reader_that_is_cancelled_before_the_first_piece_ends_the_application() -> None:
    app = App(START)
    reader = asyncio.ensure_future(rest(run_app(app, REQUEST)))
    await settle()
    reader.cancel()
    await soon(app.ended.wait())
    assert app.events == ["cancelled", "cleaned up"]


async def test_an_application_that_listens_ends_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LEAVE_S", 1000.0)
    listening, ended = asyncio.Event(), asyncio.Event()
    heard: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(piece(b"a"))
        listening.set()
        heard.append(await receive())
        # Its own work can still end in order: nothing cancels it meanwhile.
        await settle()
        ended.set()

    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    await soon(listening.wait())
    await settle()
    assert heard == []
    await messages.aclose()
    await soon(ended.wait())
    assert heard == [{"type": "http.disconnect"}]


async def test_starlette_stops_a_stream_whose_client_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "LEAVE_S", 1000.0)
    ended = asyncio.Event()

    async def tokens() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.set()

    messages = run_app(StreamingResponse(tokens()), REQUEST)
    assert (await next_piece(messages)).body == b"a"
    await messages.aclose()
    await soon(ended.wait())


async def test_a_failure_after_the_client_has_left_is_not_reported(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send(START)
        await send(piece(b"a"))
        await receive()
        ended.set()
        raise ValueError("broken")

    ended = asyncio.Event()
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    await messages.aclose()
    await soon(ended.wait())
    await settle()
    gc.collect()
    assert "never retrieved" not in caplog.text


async def test_a_generator_that_was_never_started_starts_no_application() -> None:
    app = App(START)
    await run_app(app, REQUEST).aclose()
    await settle()
    assert app.sent == 0


# Backpressure


@pytest.fixture
def small_buffer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(asgi, "MAX_BUFFERED_BYTES", 10)


async def far_ahead() -> tuple[App, AsyncGenerator[bytes, None]]:
    """Return an application that waits for its reader, and the reader's end."""
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    app.give(*(piece(b"12345") for _ in range(4)))
    await settle()
    return app, messages


@pytest.mark.usefixtures("small_buffer")
async def test_an_application_far_ahead_of_its_reader_waits() -> None:
    app, messages = await far_ahead()
    # The third piece takes it over ten bytes; that `send` doesn't return.
    assert app.sent == 4
    assert await next_piece(messages) == Piece(body=b"12345" * 3)
    await settle()
    assert app.sent == 6
    await messages.aclose()


@pytest.mark.usefixtures("small_buffer")
async def test_an_application_that_waits_for_its_reader_is_freed_when_the_reader_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(asgi, "LEAVE_S", 1000.0)
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    app.give(piece(b"x" * 11), None)
    await settle()
    assert app.sent == 2
    await messages.aclose()
    await soon(app.ended.wait())
    assert app.events == ["cleaned up"]


@pytest.mark.usefixtures("small_buffer")
async def test_an_application_that_never_stops_sending_is_cancelled_when_the_reader_leaves() -> None:
    app, messages = await far_ahead()
    app.give(*(piece(b"12345") for _ in range(100)))
    await messages.aclose()
    await soon(app.ended.wait())
    assert app.events == ["cancelled", "cleaned up"]
    assert app.sent < 20, "what nobody reads is not kept"


@pytest.mark.usefixtures("small_buffer")
async def test_an_application_waits_again_each_time_it_is_far_ahead() -> None:
    app, messages = await far_ahead()
    for _ in range(3):
        app.give(*(piece(b"12345") for _ in range(4)))
        body = (await next_piece(messages)).body
        await settle()
        assert len(body) <= 15
        assert not app.ended.is_set()
    await messages.aclose()


@pytest.mark.usefixtures("small_buffer")
async def test_the_last_piece_does_not_wait_however_large() -> None:
    app = App(START, piece(b"a"))
    messages = run_app(app, REQUEST)
    await soon(anext(messages))
    app.give({"type": "http.response.body", "body": b"x" * 1000}, None)
    await soon(app.ended.wait())
    assert await rest(messages) == [Piece(body=b"x" * 1000, usage=USAGE)]


def test_the_buffer_is_bounded() -> None:
    assert 0 < asgi.MAX_BUFFERED_BYTES <= 16 << 20


# A stream whose engine has not begun
