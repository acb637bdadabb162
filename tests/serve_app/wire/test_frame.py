"""Pieces and their messages: what is packed is what is read, and nothing else passes for an answer."""

import json
import struct
from contextlib import suppress
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.api.errors import RequestError
from serve_app.wire import frame
from serve_app.wire.frame import KEEP_ALIVE, LOST, Head, Piece, error_piece, is_event_stream, pack, unpack
from serve_app.wire.usage import RequestUsage, Tokens

TEXT = st.binary(max_size=20)
HEADERS = st.lists(st.tuples(TEXT, TEXT), max_size=5)
HEADS = st.builds(Head, st.integers(100, 599), HEADERS, st.sampled_from(["", "tokens", "again"]))
COUNTS = st.integers(0, 2**64 - 1)
SECONDS = st.floats(0, 1e6, width=32)
OUTCOMES = st.sampled_from(["ok", "cancelled", "failed", "lost"])
USAGES = st.builds(RequestUsage, st.builds(Tokens, COUNTS, COUNTS, COUNTS), SECONDS, SECONDS, OUTCOMES)
BODIES, IDS = st.binary(max_size=60), st.binary(max_size=40)
PIECES = st.builds(Piece, st.none() | HEADS, BODIES, IDS, st.none() | USAGES, st.just(False))
"""Pieces of an engine that lives: a lost engine sends no usage."""


def joined(piece: Piece) -> Piece:
    """Return a piece as a reader of its messages has it; a whole answer has its length."""
    head, body, _, usage, _ = piece
    if (
        head is not None
        and usage is not None
        and all(name.lower() != b"content-length" for name, _ in head[1])
    ):
        return piece._replace(
            head=head._replace(headers=[*head.headers, (b"content-length", b"%d" % len(body))])
        )
    return piece


@given(PIECES, st.integers(1, 50))
def test_a_piece_is_read_as_it_was_packed_however_large(piece: Piece, most: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(frame, "MAX_BODY_BYTES", most)
        first, *rest = map(unpack, pack(piece, "/v1/embeddings"))
    found = [first, *rest]
    assert max(len(each.body) for each in found) <= most
    assert all(each.head is None and not each.token_ids for each in rest)
    assert all(each.usage is None for each, _ in pairwise(found))
    body = b"".join(each.body for each in found)
    assert Piece(first.head, body, first.token_ids, found[-1].usage) == joined(piece)


@given(PIECES, st.data())
def test_a_message_cut_anywhere_never_passes_for_a_complete_answer(piece: Piece, data: st.DataObject) -> None:
    (message,) = pack(piece)
    cut = data.draw(st.integers(0, max(0, len(message) - 1)))
    with suppress(ValueError):
        assert unpack(message[:cut]).usage is None


@pytest.mark.parametrize("piece", [KEEP_ALIVE, LOST])
def test_a_keep_alive_and_a_lost_engine_are_pieces_of_their_own(piece: Piece) -> None:
    (message,) = pack(piece)
    assert unpack(message) == piece
    assert (unpack(message) is KEEP_ALIVE) == (piece is KEEP_ALIVE)


def test_a_frame_of_an_unknown_kind_is_refused() -> None:
    with pytest.raises(ValueError, match="unknown kind 99"):
        unpack(struct.pack(">BI", 99, 0))


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
    assert is_event_stream([(b"x", b"y"), (name, value)]) is expected


def test_an_error_is_a_complete_answer() -> None:
    full = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
    head, body, _, usage, _ = error_piece(full, "/v1/completions", RequestUsage())
    assert head is not None
    assert (head.status, dict(head.headers)[b"retry-after"], json.loads(body)) == (429, b"3", full.body())
    assert usage == RequestUsage()


def test_an_answer_that_is_too_large_is_refused_with_a_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MAX_ANSWER_BYTES", 100)
    usage = RequestUsage(Tokens(3, 0, 0))
    (message,) = pack(Piece(Head(200, []), b"a" * 101, usage=usage), "/v1/embeddings")
    piece = unpack(message)
    assert piece.head is not None
    text = json.loads(piece.body)["error"]["message"]
    assert (piece.head.status, piece.usage) == (413, usage)
    assert "101 bytes; at most 100" in text
    assert "base64" in text
