"""Complete answers of a replica: JSON, or an error in OpenAI's shape."""

import json

import pytest

from serve_app.api.errors import RequestError
from serve_app.engine.replica import answer, routing_stats
from serve_app.relay.frame import Head, Piece, unpack
from serve_app.relay.usage import RequestUsage


async def test_a_body_is_answered_as_json() -> None:
    async def body() -> bytes:
        return b'{"a": 1}'

    usage = RequestUsage(3, 4)
    head = Head(200, [(b"content-type", b"application/json")])
    assert unpack(await answer(body(), usage)) == Piece(head, b'{"a": 1}', usage=usage)


async def test_a_refusal_is_answered_with_its_status_and_headers() -> None:
    async def body() -> bytes:
        raise RequestError(429, "rate_limit_error", "full", retry_after_s=2)

    piece = unpack(await answer(body(), RequestUsage()))
    assert piece.head is not None
    assert piece.usage is not None
    assert piece.head.status == 429
    assert (b"retry-after", b"2") in piece.head.headers
    assert json.loads(piece.body)["error"]["message"] == "full"


async def test_any_other_error_is_no_answer() -> None:
    async def body() -> bytes:
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        await answer(body(), RequestUsage())


@pytest.mark.parametrize(
    ("tokens", "reported"), [(0, 0), (1, 1), (7, 7), (100, 96), (1_000, 1_024), (100_000, 98_304)]
)
def test_the_tokens_that_a_replica_reports_are_rounded(tokens: int, reported: int) -> None:
    """Every report that differs is sent to all handles."""
    assert routing_stats(tokens) == {"tokens": reported}


def test_a_load_that_hardly_changes_is_reported_once() -> None:
    assert len({routing_stats(tokens)["tokens"] for tokens in range(60_000, 69_000)}) <= 2
