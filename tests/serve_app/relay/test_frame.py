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
from serve_app.relay.usage import RequestUsage, Tokens

FULL = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
TEXT = st.binary(max_size=20)
HEADERS = st.lists(st.tuples(TEXT, TEXT), max_size=5)
HEADS = st.builds(Head, st.integers(100, 599), HEADERS, st.sampled_from(["", "tokens", "again"]))
COUNTS = st.integers(0, 2**32 - 1)
SECONDS = st.floats(0, 1e6, width=32)
USAGE = RequestUsage(Tokens(3, 0, 4))
USAGES = st.builds(RequestUsage, st.builds(Tokens, COUNTS, COUNTS, COUNTS), SECONDS, SECONDS)
MESSAGE = pack(
    head=Head(200, [(b"a", b"b")]), body=b"text", token_ids=b"1234", usage=RequestUsage(Tokens(3, 0, 4))
)


@given(st.none() | HEADS, st.binary(), st.binary(max_size=40), st.none() | USAGES)
def test_a_piece_is_read_as_it_was_packed(
    head: Head | None, body: bytes, token_ids: bytes, usage: RequestUsage | None
) -> None:
    message = pack(head=head, body=body, token_ids=token_ids, usage=usage)
    assert unpack(message) == Piece(head, body, token_ids, usage)


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


@given(st.none() | HEADS, st.binary(max_size=40), st.none() | USAGES, st.integers(1, 50))
def test_a_large_message_goes_in_parts_that_are_the_same_answer(
    head: Head | None, body: bytes, usage: RequestUsage | None, most: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "MAX_BODY_BYTES", most)
        message = pack(head=head, body=body, token_ids=b"1234", usage=usage)
        parts = list(split(message, "/v1/embeddings"))
    if len(message) <= most:
        assert parts == [message]
        return
    pieces = list(map(unpack, parts))
    assert b"".join(piece.body for piece in pieces) == body
    assert [piece.usage for piece in pieces] == [None] * (len(pieces) - 1) + [usage]
    assert [piece.head is None for piece in pieces[1:]] == [True] * (len(pieces) - 1)
    assert b"".join(piece.token_ids for piece in pieces) == b"1234"
    if body:
        assert max(len(piece.body) for piece in pieces) <= most


def test_a_whole_answer_in_parts_says_how_long_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_BODY_BYTES", 10)
    for headers in ([], [(b"Content-Length", b"25")]):
        first, *_ = split(pack(head=Head(200, headers), body=b"a" * 25, usage=RequestUsage()), "/process")
        head = unpack(first).head
        assert head is not None
        assert [(name.lower(), value) for name, value in head.headers] == [(b"content-length", b"25")]


def test_an_answer_that_is_too_large_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_BODY_BYTES", 10)
    monkeypatch.setattr(frame, "MAX_ANSWER_BYTES", 100)
    usage = RequestUsage(Tokens(3, 0, 0))
    (refusal,) = split(pack(head=Head(200, []), body=b"a" * 101, usage=usage), "/v1/embeddings")
    piece = unpack(refusal)
    assert piece.head is not None
    assert piece.head.status == 413
    message = json.loads(piece.body)["error"]["message"]
    assert "101 bytes; at most 100" in message
    assert "base64" in message
    assert piece.usage == usage


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
