"""A stream of an Engine with its token ids beside it, so that it can go on elsewhere."""

import asyncio
from dataclasses import replace
from typing import Any

import pytest
from starlette.types import Message

from serve_app.api.errors import engine_failed
from serve_app.relay import asgi
from serve_app.relay.frame import Head, Piece, pack_error, unpack
from serve_app.relay.request import RelayRequest
from serve_app.relay.resume import ResumeMode, StreamTokens, to_ids
from serve_app.relay.usage import RequestUsage
from tests.progress import STILL_S

LIMIT_S = STILL_S
REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")
EVENTS = [(b"content-type", b"text/event-stream")]


def tokens_of(resume: ResumeMode) -> StreamTokens:
    tokens = StreamTokens()
    tokens.resume = resume
    return tokens


def run_app(app: Any, request: RelayRequest = REQUEST, **options: Any) -> Any:
    return asgi.run_app(app, request, usage=RequestUsage(), **options)


def app(tokens: StreamTokens, *steps: Any, headers: list[tuple[bytes, bytes]] = EVENTS) -> Any:
    """Return an application that sends bytes; lists are the ids of tokens, and events are waited for."""

    async def run(scope: Message, receive: Any, send: Any) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        for step in steps:
            match step:
                case bytes():
                    await send({"type": "http.response.body", "body": step, "more_body": True})
                    await asyncio.sleep(0)
                case list():
                    tokens.add(step)
                case asyncio.Event():
                    await step.wait()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return run


async def received(messages: Any) -> list[Piece]:
    async with asyncio.timeout(LIMIT_S):
        return [unpack(message) async for message in messages]


async def test_each_piece_brings_the_tokens_that_came_before_it() -> None:
    tokens = tokens_of("tokens")
    pieces = await received(run_app(app(tokens, [1, 2], b"a", [3], b"b", b"c"), stream=tokens))
    assert pieces[0].head == Head(200, EVENTS, "tokens")
    assert b"".join(piece.body for piece in pieces) == b"abc"
    assert [token for piece in pieces for token in to_ids(piece.token_ids)] == [1, 2, 3]
    assert to_ids(pieces[0].token_ids)[:2] == [1, 2]


async def test_the_rest_of_a_stream_looks_the_same_when_it_comes_at_once() -> None:
    tokens = tokens_of("tokens")

    async def at_once(scope: Message, receive: Any, send: Any) -> None:
        tokens.add([1])
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        await send({"type": "http.response.body", "body": b"a", "more_body": False})

    for resumes in (False, True):
        asked = replace(REQUEST, resumes=resumes)
        (piece,) = await received(run_app(at_once, asked, stream=tokens))
        assert piece.usage is not None
        assert piece.head == Head(200, EVENTS, "tokens" if resumes else "")
        assert piece.body == b"a"


@pytest.mark.parametrize("stream", [None, tokens_of("")], ids=["no tokens", "not resumable"])
async def test_other_streams_bring_no_tokens(stream: StreamTokens | None) -> None:
    pieces = await received(run_app(app(tokens_of(""), [1], b"a", b"b"), stream=stream))
    assert pieces[0].head == Head(200, EVENTS)
    assert b"".join(piece.body for piece in pieces) == b"ab"
    assert not any(piece.token_ids for piece in pieces)


async def test_an_answer_that_is_no_stream_brings_no_tokens() -> None:
    tokens = tokens_of("tokens")
    headers = [(b"content-type", b"application/json")]
    pieces = await received(run_app(app(tokens, [1], b"a", b"b", headers=headers), stream=tokens))
    assert pieces[0].head == Head(200, headers)
    assert b"".join(piece.body for piece in pieces) == b"ab"
    assert not any(piece.token_ids for piece in pieces)


@pytest.mark.parametrize("resume", ["tokens", "again", ""])
async def test_the_rest_of_a_stream_whose_engine_died_is_dropped(resume: ResumeMode) -> None:
    died = asyncio.Event()
    tokens = tokens_of(resume)
    steps = [1], b"a", died, b'data: {"error": 1}\n\n', b"data: [DONE]\n\n"
    messages = run_app(app(tokens, *steps), stream=tokens, lost=died.is_set)
    await asyncio.wait_for(anext(messages), LIMIT_S)
    died.set()
    assert await received(messages) == [Piece(lost=True)]


async def test_an_engine_that_died_before_the_head_has_not_answered() -> None:
    tokens = tokens_of("tokens")
    failed = engine_failed()
    messages = run_app(app(tokens, b"data: {}\n\n"), refusal=lambda: failed, stream=tokens, lost=lambda: True)
    assert await received(messages) == [unpack(pack_error(failed))]
