"""Complete answers of a replica: JSON, or an error in OpenAI's shape."""

import pytest

from serve_app.engine.replica import replica_tag, routing_stats, usage_stats
from serve_app.ledger.calls import CallBook
from serve_app.wire.usage import Tokens
from tests.serve_app.ledger.crashing import ran


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
