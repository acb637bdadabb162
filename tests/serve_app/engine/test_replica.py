"""The rates of a replica."""

from serve_app.engine.replica import Growth


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
