"""An answer that takes its time, and what is heard of it meanwhile."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

import pytest

from serve_app.relay import keepalive
from serve_app.relay.asgi import Head, Message, RelayRequest, run_app
from serve_app.relay.keepalive import ALIVE, with_keepalive

LIMIT_S = 5.0
REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")
EVENTS = [(b"content-type", b"text/event-stream")]


@pytest.fixture(autouse=True)
def pulse_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_S", 0.01)


async def next_of(messages: AsyncGenerator[bytes, None]) -> bytes:
    async with asyncio.timeout(LIMIT_S):
        return await anext(messages)


async def next_said(messages: AsyncGenerator[bytes, None]) -> bytes:
    """Return the next message that is more than a sign of life."""
    while not (message := await next_of(messages)):
        pass
    return message


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


async def test_a_stream_that_has_nothing_to_say_gives_signs_of_life() -> None:
    goes_on = asyncio.Event()
    async with aclosing(run_app(app(goes_on), REQUEST)) as messages:
        assert [await next_of(messages) for _ in range(3)] == [ALIVE] * 3
        goes_on.set()
        assert Head.unpack(await next_said(messages))[1] == b"a"
        assert [await next_of(messages) for _ in range(3)] == [ALIVE] * 3
        goes_on.set()
        assert await next_said(messages) == b"b"
        goes_on.set()
        async with asyncio.timeout(LIMIT_S):
            assert not any([message async for message in messages])


async def test_one_that_is_quick_gives_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keepalive, "KEEPALIVE_S", LIMIT_S)
    goes_on = asyncio.Event()
    goes_on.set()
    async with aclosing(run_app(app(goes_on), REQUEST)) as messages:
        assert Head.unpack(await next_of(messages))[1] == b"a"
        goes_on.set()
        assert await next_of(messages) == b"b"


async def test_so_does_an_answer_that_comes_at_once_when_it_comes() -> None:
    ready = asyncio.Event()

    async def answer() -> bytes:
        await ready.wait()
        return b"whole"

    messages = with_keepalive(answer())
    assert [await next_of(messages) for _ in range(2)] == [ALIVE] * 2
    ready.set()
    assert await next_said(messages) == b"whole"
    assert [message async for message in messages] == []


async def test_its_failure_is_raised() -> None:
    async def fails() -> bytes:
        raise ValueError("wrong")

    with pytest.raises(ValueError, match="wrong"):
        await next_of(with_keepalive(fails()))


async def test_who_leaves_ends_it() -> None:
    ended = asyncio.Event()

    async def answer() -> bytes:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return b""

    async with aclosing(with_keepalive(answer())) as messages:
        assert await next_of(messages) == ALIVE
    async with asyncio.timeout(LIMIT_S):
        await ended.wait()
