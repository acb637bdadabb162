"""An answer between the application that makes it and its reader: the same bytes, or an error in place."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import dataclass, replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Send

from serve_app.api.errors import RequestError
from serve_app.engine.answer import Answer, StreamTokens
from serve_app.wire.frame import DONE, KEEP_ALIVE, KEEPALIVE_S, Head, Piece, error_event, error_piece, to_ids
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage
from tests.batcher.virtual import VirtualLoop, blocked, now, virtual

REQUEST = RelayRequest("POST", "/v1/x", b"a=1&b=%20", [(b"accept", b"*/*"), (b"x", b"\xff")], b"question")
STREAM = [(b"content-type", b"text/event-stream; charset=utf-8")]
WHOLE = [(b"content-type", b"application/json")]
FULL = RequestError(429, "rate_limit_error", "full", retry_after_s=3)


def start(headers: list[tuple[bytes, bytes]] = STREAM) -> Message:
    return {"type": "http.response.start", "status": 200, "headers": headers}


def piece(body: bytes, more: bool = True) -> Message:
    return {"type": "http.response.body", "body": body, "more_body": more}


END = piece(b"", more=False)


def sending(*messages: Message | float | Exception) -> Any:
    """Return an application that sends messages; a number is a pause in seconds."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        for message in messages:
            if isinstance(message, Exception):
                raise message
            await (asyncio.sleep(message) if isinstance(message, float) else send(message))

    return app


def reading(app: Any, request: RelayRequest = REQUEST, **options: Any) -> AsyncGenerator[Piece, None]:
    answer = Answer(request, RequestUsage(), **options)
    return answer.pieces(answer.run(app))


async def all_of(pieces: AsyncGenerator[Piece, None]) -> list[Piece]:
    return [each async for each in pieces if each is not KEEP_ALIVE]


def text_of(pieces: list[Piece]) -> bytes:
    return b"".join(each.body for each in pieces)


@dataclass
class Fate:
    """The fate of an application behind a number of its messages.

    Attributes:
        what: "ends", or how it fails.
        after: The number.
    """

    what: str
    after: int


@given(
    bodies=st.lists(st.sampled_from([b"a", b"bc", b"data: 1\n\n", DONE, b""]), max_size=8),
    streams=st.booleans(),
    app_s=st.lists(st.sampled_from([0.0, 0.1, 12.0]), min_size=1, max_size=4),
    reader_s=st.lists(st.sampled_from([0.0, 0.1, 12.0]), min_size=1, max_size=4),
    buffered=st.sampled_from([0, 3, 1 << 20]),
    fate=st.builds(Fate, st.sampled_from(["ends", "raises", "refused", "dies"]), st.integers(0, 8)),
)
def test_the_bytes_arrive_in_order_or_an_error_takes_their_place(
    bodies: list[bytes],
    streams: bool,
    app_s: list[float],
    reader_s: list[float],
    buffered: int,
    fate: Fate,
) -> None:
    met: set[str] = set()
    sent: list[bytes] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(start(STREAM if streams else WHOLE))
        for i, body in enumerate(bodies):
            await asyncio.sleep(app_s[i % len(app_s)])
            if i >= fate.after and fate.what != "ends":
                met.add(fate.what)
                if fate.what == "raises":
                    raise ValueError
                await send(piece(b"the application's own event of its error"))
                await send(END)
                return
            sent.append(body)
            await send(piece(body))
        await send(END)

    async def read() -> tuple[list[Piece], bool]:
        usage = RequestUsage()
        answer = Answer(
            REQUEST,
            usage,
            refusal=lambda: FULL if met & {"refused", "dies"} else None,
            lost=lambda: "dies" in met,
            buffered=buffered,
        )
        found: list[Piece] = []
        async with contextlib.aclosing(answer.pieces(answer.run(app))) as pieces:
            try:
                async for each in pieces:
                    found.append(each)
                    await asyncio.sleep(reader_s[len(found) % len(reader_s)])
            except ValueError:
                return found, True
        return found, False

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        found, raised = runner.run(read())
    found = [each for each in found if each is not KEEP_ALIVE]
    text, whole = text_of(found), b"".join(sent)
    assert all(each.usage is None and not each.lost for each in found[:-1])
    assert all(each.head is None for each in found[1:])
    if raised:
        # `Replica` makes an error of it; here nothing passes for a complete answer.
        assert "raises" in met
        assert not any(each.usage for each in found)
        assert whole.startswith(text)
        return
    last = found[-1]
    if last.lost:
        assert "dies" in met
        assert whole.startswith(text)
        return
    assert last.usage is not None
    head = found[0].head
    assert head is not None
    if head.status == 429:
        assert found == [error_piece(FULL, REQUEST.path, last.usage)]
    elif streams and "refused" in met:
        assert text == whole + error_event(FULL, REQUEST.path)
        assert last.usage.outcome == "failed"
    elif met <= {"raises"}:
        # A failure behind DONE is not the answer's.
        assert text == whole
        assert not met or whole.endswith(DONE)
        assert last.usage.outcome == "ok"
    else:
        # The client has a part of an answer that is no stream.
        assert text.startswith(whole)


@virtual
async def test_the_application_gets_the_request() -> None:
    seen: list[Message] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        seen.extend([scope, await receive()])
        await sending(start(), END)(scope, receive, send)

    for _ in range(2):
        await all_of(reading(app))
    scope, body, other, _ = seen
    assert [scope[name] for name in ("type", "method", "path", "query_string", "headers")] == [
        *("http", "POST", "/v1/x", b"a=1&b=%20"),
        REQUEST.headers,
    ]
    assert body == {"type": "http.request", "body": b"question", "more_body": False}
    assert scope["state"] is not other["state"], "requests share nothing"


@virtual
async def test_each_piece_leaves_at_once_and_the_event_that_clients_leave_by_with_the_end() -> None:
    app = sending(start(), piece(b"a"), 1.0, piece(b"b"), 1.0, piece(DONE), 1.0, END)
    found = [(now(), each.body) async for each in reading(app)]
    assert found == [(0.0, b"a"), (1.0, b"b"), (3.0, DONE)]


@virtual
async def test_pieces_travel_together_while_the_reader_is_busy() -> None:
    pieces = reading(sending(start(), piece(b"a"), 1.0, piece(b"b"), piece(b"c"), 5.0, END))
    assert (await anext(pieces)).body == b"a"
    await asyncio.sleep(2.0)
    assert (await anext(pieces)).body == b"bc"
    await pieces.aclose()


@virtual
async def test_an_answer_that_takes_long_has_keep_alives() -> None:
    found = [
        (now(), each)
        async for each in reading(sending(16.0, start(), piece(b"a"), 1.0, piece(b"b"), 11.0, END))
    ]
    silent = [at for at, each in found if each is KEEP_ALIVE]
    assert silent == [KEEPALIVE_S * number for number in range(1, 6)]
    assert text_of([each for _, each in found]) == b"ab"


@virtual
async def test_an_application_far_ahead_of_its_reader_waits() -> None:
    sent: list[int] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        for number in range(100):
            await send(piece(b"12345"))
            sent.append(number)

    pieces = reading(app, buffered=10)
    for taken in range(1, 4):
        assert (await anext(pieces)).body == b"12345" * 3
        await blocked()
        assert len(sent) == 3 * taken + 2, "the third piece is one too many"
    await pieces.aclose()
    await blocked()
    assert len(sent) < 20, "what nobody reads is not kept"


@pytest.mark.parametrize("listens", [True, False])
@virtual
async def test_an_application_whose_client_leaves_ends(listens: bool) -> None:
    ended: list[tuple[str, float]] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await receive()
        await send(start())
        await send(piece(b"a"))
        try:
            if listens:
                assert await receive() == {"type": "http.disconnect"}
                await asyncio.sleep(0.5)
                ended.append(("by itself", now()))
            await asyncio.sleep(1000.0)
        except asyncio.CancelledError:
            ended.append(("cancelled", now()))
            raise

    pieces = reading(app, leave_s=2.0)
    await anext(pieces)
    await blocked()
    left = now()
    await pieces.aclose()
    await asyncio.sleep(10.0)
    at_once = [("cancelled", pytest.approx(left))]
    assert ended == ([("by itself", left + 0.5), ("cancelled", left + 2.0)] if listens else at_once)


@virtual
async def test_starlette_stops_a_stream_whose_client_has_left() -> None:
    ended = asyncio.Event()

    async def tokens() -> AsyncGenerator[bytes, None]:
        try:
            yield b"a"
            await asyncio.Event().wait()
        finally:
            ended.set()

    pieces = reading(StreamingResponse(tokens()), leave_s=1000.0)
    assert (await anext(pieces)).body == b"a"
    await pieces.aclose()
    await ended.wait()
    assert now() < 1.0


@virtual
async def test_an_application_may_work_on_after_its_answer() -> None:
    worked: list[float] = []

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await sending(start(WHOLE), piece(b"a", more=False), 30.0)(scope, receive, send)
        worked.append(now())
        raise ValueError("nobody is told")

    assert text_of(await all_of(reading(app))) == b"a"
    await asyncio.sleep(60.0)
    assert worked == [30.0]


# A stream that may go on elsewhere


def with_tokens(tokens: StreamTokens, *steps: bytes | list[int]) -> Any:
    """Return an application that streams bytes; lists are the ids of tokens."""

    async def app(scope: Message, receive: Receive, send: Send) -> None:
        await send(start())
        for step in steps:
            if isinstance(step, list):
                tokens.add(step)
            else:
                await send(piece(step))
                await asyncio.sleep(1.0)
        await send(END)

    return app


async def resumable(tokens: StreamTokens | None, app: Any, request: RelayRequest = REQUEST) -> list[Piece]:
    answer = Answer(request, RequestUsage())
    answer.tokens = tokens
    return await all_of(answer.pieces(answer.run(app)))


@virtual
async def test_each_piece_brings_the_tokens_that_came_before_it() -> None:
    tokens = StreamTokens()
    tokens.resume = "tokens"
    pieces = await resumable(tokens, with_tokens(tokens, [1, 2], b"a", [3], b"b", b"c"))
    assert pieces[0].head == Head(200, STREAM, "tokens")
    assert [to_ids(each.token_ids) for each in pieces] == [[1, 2], [3], [], []]


@pytest.mark.parametrize("resume", ["", "tokens"])
@virtual
async def test_other_streams_bring_no_tokens(resume: Any) -> None:
    tokens = StreamTokens()
    tokens.resume = resume
    pieces = await resumable(None if resume else tokens, with_tokens(tokens, [1], b"a", [2], b"b"))
    assert pieces[0].head == Head(200, STREAM)
    assert not any(each.token_ids for each in pieces)


@pytest.mark.parametrize("resumes", [False, True])
@virtual
async def test_only_the_second_half_of_a_stream_has_tokens_when_it_is_complete_at_once(resumes: bool) -> None:
    tokens = StreamTokens()
    tokens.resume = "tokens"
    app = sending(start(), piece(b"a", more=False))
    (found,) = await resumable(tokens, app, replace(REQUEST, resumes=resumes))
    assert found.head == Head(200, STREAM, "tokens" if resumes else "")
