"""Relay messages: what is packed is what is read, and nothing else passes for a message."""

import json
import struct
from contextlib import suppress

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.errors import RequestError
from serve_app.relay import frame
from serve_app.relay.frame import KEEP_ALIVE, LOST, Head, Piece, pack, pack_error, split, unpack
from serve_app.relay.usage import RequestUsage

FULL = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
TEXT = st.binary(max_size=20)
HEADERS = st.lists(st.tuples(TEXT, TEXT), max_size=5)
HEADS = st.builds(Head, st.integers(100, 599), HEADERS, st.sampled_from(["", "tokens", "again"]))
COUNTS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, 1e6, width=32)
USAGES = st.builds(RequestUsage, COUNTS, COUNTS, SECONDS, SECONDS)
MESSAGE = pack(head=Head(200, [(b"a", b"b")]), body=b"text", token_ids=b"1234", usage=RequestUsage(3, 4))


@given(st.none() | HEADS, st.binary(), st.binary(max_size=40), st.none() | USAGES)
def test_a_piece_is_read_as_it_was_packed(
    head: Head | None, body: bytes, token_ids: bytes, usage: RequestUsage | None
) -> None:
    message = pack(head=head, body=body, token_ids=token_ids, usage=usage)
    assert unpack(message) == Piece(head, body, token_ids, usage)


@given(st.none() | HEADS, st.binary(max_size=200), st.binary(max_size=40), st.none() | USAGES)
def test_a_large_body_is_split_into_messages_that_make_the_same_answer(
    head: Head | None, body: bytes, token_ids: bytes, usage: RequestUsage | None
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "LARGEST", 16)
        pieces = [
            unpack(part) for part in split(pack(head=head, body=body, token_ids=token_ids, usage=usage))
        ]
    assert b"".join(piece.body for piece in pieces) == body
    assert max(len(piece.body) for piece in pieces) <= 16
    assert [piece.head for piece in pieces] == [head] + [None] * (len(pieces) - 1)
    assert [piece.usage for piece in pieces] == [None] * (len(pieces) - 1) + [usage]
    assert b"".join(piece.token_ids for piece in pieces) == token_ids


@pytest.mark.parametrize("message", [KEEP_ALIVE, LOST, MESSAGE])
def test_a_small_message_is_not_split(message: bytes) -> None:
    assert list(split(message)) == [message]


def test_a_keep_alive_is_an_empty_piece() -> None:
    assert unpack(KEEP_ALIVE) == Piece()


def test_a_lost_engine_differs_from_an_empty_piece() -> None:
    assert unpack(LOST) == Piece(lost=True)


def test_a_head_may_hold_the_headers_that_asgi_allows() -> None:
    # Lists in place of tuples, and a name twice.
    head = Head(200, [[b"set-cookie", b"a"], [b"set-cookie", b"b"]])  # type: ignore[list-item]
    assert unpack(pack(head=head)).head == Head(200, [(b"set-cookie", b"a"), (b"set-cookie", b"b")])


@pytest.mark.parametrize(
    ("name", "value", "expected"),
    [
        (b"content-type", b"text/event-stream", True),
        (b"Content-Type", b"text/event-stream; charset=utf-8", True),
        (b"content-type", b"application/json", False),
        (b"accept", b"text/event-stream", False),
    ],
)
def test_event_streams_are_known_by_their_content_type(name: bytes, value: bytes, expected: bool) -> None:
    assert Head(200, [(b"x", b"y"), (name, value)]).is_event_stream is expected
    assert not Head(200, []).is_event_stream


def test_an_error_is_a_complete_answer_in_one_message() -> None:
    piece = unpack(pack_error(FULL))
    assert piece.head is not None
    assert piece.head.status == 429
    assert dict(piece.head.headers) == {b"content-type": b"application/json", b"retry-after": b"3"}
    assert json.loads(piece.body) == FULL.body()
    assert piece.usage == RequestUsage()


def test_a_message_that_is_cut_short_never_passes_for_a_complete_answer() -> None:
    for length in range(1, len(MESSAGE)):
        with suppress(ValueError):
            assert unpack(MESSAGE[:length]).usage is None


@pytest.mark.parametrize("length", [3, 7])
def test_a_frame_that_is_cut_short_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="ends inside a frame"):
        unpack(MESSAGE[:length])


def test_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 99"):
        unpack(struct.pack(">BI", 99, 0))
