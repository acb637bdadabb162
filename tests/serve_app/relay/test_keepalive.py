"""Keep-alive messages of an answer that takes its time."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest
from starlette.types import Message

from serve_app.relay import keepalive
from serve_app.relay.asgi import run_app
from serve_app.relay.frame import KEEP_ALIVE, unpack
from serve_app.relay.keepalive import with_keepalive
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage
from tests.progress import STILL_S

LIMIT_S = STILL_S
REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")
EVENTS = [(b"content-type", b"text/event-stream")]


@pytest.fixture(autouse=True)
def keepalive_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_S", 0.01)


async def next_of(messages: AsyncGenerator[bytes, None]) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        return await anext(messages)


async def next_body(messages: AsyncGenerator[bytes, None]) -> bytes:
    """Return the body of the next message that is no keep-alive."""
    while (message := await next_of(messages)) == KEEP_ALIVE:
        pass
    return unpack(message).body


def app(goes_on: asyncio.Event) -> Any:
    """Return an application that waits before its head, and before each of its pieces."""

    async def run(scope: Message, receive: Any, send: Any) -> None:
        await goes_on.wait()
        goes_on.clear()
        await send({"type": "http.response.start", "status": 200, "headers": EVENTS})
        for body in (b"a", b"b"):
            await send({"type": "http.response.body", "body": body, "more_body": True})
            await goes_on.wait()
            goes_on.clear()
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    return run


async def test_a_stream_that_has_nothing_to_send_sends_keep_alives() -> None:
    goes_on = asyncio.Event()
    async with aclosing(run_app(app(goes_on), REQUEST, usage=RequestUsage())) as messages:
        assert [await next_of(messages) for _ in range(3)] == [KEEP_ALIVE] * 3
        goes_on.set()
        assert await next_body(messages) == b"a"
        assert [await next_of(messages) for _ in range(3)] == [KEEP_ALIVE] * 3
        goes_on.set()
        assert await next_body(messages) == b"b"
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            assert not any([unpack(message).body async for message in messages])


async def test_a_quick_stream_sends_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_S", LIMIT_S)
    goes_on = asyncio.Event()
    goes_on.set()
    async with aclosing(run_app(app(goes_on), REQUEST, usage=RequestUsage())) as messages:
        assert unpack(await next_of(messages)).body == b"a"
        goes_on.set()
        assert unpack(await next_of(messages)).body == b"b"


async def test_keep_alives_precede_a_complete_answer() -> None:
    ready = asyncio.Event()

    async def answer() -> bytes:
        await ready.wait()
        return b"whole"

    messages = with_keepalive(answer())
    assert [await next_of(messages) for _ in range(2)] == [KEEP_ALIVE] * 2
    ready.set()
    assert await next_of(messages) == b"whole"
    assert [message async for message in messages] == []


async def test_the_failure_of_an_answer_is_raised() -> None:
    async def fails() -> bytes:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await next_of(with_keepalive(fails()))


async def test_closing_the_stream_cancels_the_answer() -> None:
    ended = asyncio.Event()

    async def answer() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    async with aclosing(with_keepalive(answer())) as messages:
        assert await next_of(messages) == KEEP_ALIVE
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()
