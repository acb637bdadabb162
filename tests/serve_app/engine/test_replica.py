"""Complete answers of a replica: JSON, or an error in OpenAI's shape."""

import json

import pytest

from serve_app.api.errors import RequestError
from serve_app.engine.replica import answer, replica_tag, routing_stats, usage_stats
from serve_app.ledger.calls import CallBook
from serve_app.relay.frame import Head, Piece, unpack
from serve_app.relay.usage import RequestUsage, Tokens
from tests.serve_app.engine.engine_doubles import REQUEST
from tests.serve_app.ledger.crashing import ran


async def test_a_body_is_answered_as_json() -> None:
    async def body() -> bytes:
        return b'{"a": 1}'

    usage = RequestUsage(Tokens(3, 0, 4))
    head = Head(200, [(b"content-type", b"application/json")])
    assert unpack(await answer(body(), usage, REQUEST)) == Piece(head, b'{"a": 1}', usage=usage)


async def test_a_refusal_is_answered_with_its_status_and_headers() -> None:
    async def body() -> bytes:
        raise RequestError(429, "rate_limit_error", "full", retry_after_s=2)

    piece = unpack(await answer(body(), RequestUsage(), REQUEST))
    assert piece.head is not None
    assert piece.usage is not None
    assert piece.head.status == 429
    assert (b"retry-after", b"2") in piece.head.headers
    assert json.loads(piece.body)["error"]["message"] == "full"


async def test_any_other_error_is_a_500_with_its_stack_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def body() -> bytes:
        raise ValueError("broken")

    piece = unpack(await answer(body(), RequestUsage(), REQUEST))
    assert piece.head is not None
    assert piece.head.status == 500
    assert b"broken" not in piece.body
    (record,) = [record for record in caplog.records if record.exc_info]
    assert record.exc_info is not None
    assert isinstance(record.exc_info[1], ValueError)


@pytest.mark.parametrize(
    ("tokens", "reported"), [(0, 0), (1, 1), (7, 7), (100, 96), (1_000, 1_024), (100_000, 98_304)]
)
def test_the_tokens_that_a_replica_reports_are_rounded(tokens: int, reported: int) -> None:
    """Every report that differs is sent to all handles."""
    assert routing_stats(tokens) == {"tokens": reported}


def test_a_load_that_hardly_changes_is_reported_once() -> None:
    assert len({routing_stats(tokens)["tokens"] for tokens in range(60_000, 69_000)}) <= 2


def test_the_usage_has_the_largest_tenants_and_the_sum_of_the_others() -> None:
    book = CallBook("demo")
    for tenant, output in (("a", 1), ("b", 30), ("c", 2), ("b", 10), ("", 7)):
        ran(book, Tokens(3, 1, output), tenant)
    stats = usage_stats(book, 1)
    assert stats["tenants"]["b"] == {"calls": 2, "prompt": 6, "cached": 2, "output": 40, "cost": 0}
    assert stats["tenants"]["other"]["output"] == 3
    # Of the replica itself.
    assert stats["own"]["output"] == 7
    assert usage_stats(CallBook("demo"), 20)["tenants"] == {}


def test_outside_of_ray_serve_a_replica_has_no_name() -> None:
    assert replica_tag() == ""


def test_a_replica_that_sleeps_says_so() -> None:
    assert routing_stats(0, asleep=True) == {"tokens": 0, "asleep": 1}
