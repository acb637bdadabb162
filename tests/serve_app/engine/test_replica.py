"""Complete answers of a replica: JSON, or an error in OpenAI's shape."""

import pytest

from serve_app.engine.replica import Growth, replica_tag, routing_stats, usage_stats
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
    stats = usage_stats(book, 1, {"tenant a": 2.0, "tenant b": 7.0, "tenant c": 3.0})
    sums = {"calls": 2, "prompt": 6, "cached": 2, "output": 40, "cost": 0}
    assert stats["tenants"]["b"] == sums | {"tokens_per_s": 7.0}
    assert (stats["tenants"]["other"]["output"], stats["tenants"]["other"]["tokens_per_s"]) == (3, 5.0)
    # Of the replica itself.
    assert stats["own"]["output"] == 7
    assert usage_stats(CallBook("demo"), 20, {})["tenants"] == {}


def test_rates_are_taken_over_the_last_seconds() -> None:
    now, counters = 100.0, {"requests": 5.0}
    growth = Growth(lambda: dict(counters), lambda: now)
    assert growth.per_s() == (0.0, {"requests": 0.0})
    for second in range(1, 6):
        now = 100.0 + second
        counters["requests"] += 10 * second
        growth.sample()
    now, counters["requests"] = 105.5, counters["requests"] + 10
    # The samples of seconds 3, 4 and 5 are kept.
    assert growth.per_s() == (2.5, {"requests": (40 + 50 + 10) / 2.5})
    counters = {"requests": 1.0, "tenant new": 25.0}
    assert growth.per_s() == (2.5, {"requests": 0.0, "tenant new": 10.0})


def test_outside_of_ray_serve_a_replica_has_no_name() -> None:
    assert replica_tag() == ""


def test_a_replica_that_sleeps_says_so() -> None:
    assert routing_stats(0, asleep=True) == {"tokens": 0, "asleep": 1}
