import asyncio

import pytest
from starlette.requests import Request
from starlette.types import Message

from serve_app.api.errors import RequestError
from serve_app.api.small_body import small_body


def request(*messages: Message) -> Request:
    """Return a request whose client sends these messages, and then nothing."""
    left = list(messages)

    async def receive() -> Message:
        if not left:
            await asyncio.Event().wait()
        return left.pop(0)

    return Request({"type": "http", "method": "POST", "headers": []}, receive)


def piece(data: bytes, more: bool = True) -> Message:
    return {"type": "http.request", "body": data, "more_body": more}


async def test_a_byte_order_mark_is_no_part_of_the_body() -> None:
    assert await small_body(request(piece(b"\xef"), piece(b"\xbb\xbf{}", more=False)), 5) == b"{}"


async def test_the_pieces_are_joined() -> None:
    assert await small_body(request(piece(b"ab"), piece(b"cd", more=False)), 4) == b"abcd"


@pytest.mark.parametrize(
    ("messages", "status"),
    [
        ((piece(b"ab"), piece(b"cde")), 413),
        ((piece(b"ab"), {"type": "http.disconnect"}), 400),
        ((piece(b"ab"),), 408),
    ],
    ids=["too large", "ends early", "too slow"],
)
async def test_a_body_that_does_not_come_is_refused(
    messages: tuple[Message, ...], status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("serve_app.api.small_body.BODY_S", 0.01 if status == 408 else 20.0)
    with pytest.raises(RequestError) as caught:
        await small_body(request(*messages), 4)
    assert caught.value.status == status


async def test_each_piece_is_counted_when_it_comes() -> None:
    counted: list[int] = []
    assert await small_body(request(piece(b"ab"), piece(b"cde", more=False)), 9, counted.append) == b"abcde"
    assert sum(counted) == 5

    def refuse(size: int) -> None:
        raise RequestError(503, "overloaded_error", "full")

    with pytest.raises(RequestError, match="full"):
        await small_body(request(piece(b"ab")), 9, refuse)
