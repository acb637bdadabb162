"""Used shares of limits as metrics, with a bounded number of series."""

from collections.abc import AsyncIterator

from serve_app.quotas.counters import LimitState
from serve_app.quotas.metrics import QuotaMetrics
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters

NAME = "saturate_quota_used_ratio"


def meters(values: dict[tuple[str, ...], float]) -> Meters:
    """Return meters that put the last value of each series into `values`."""

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            values[metric.name, *labels.values()] = value

        return record

    return Meters(catalogue.QUOTAS, make)


async def states(left: dict[str, int]) -> AsyncIterator[tuple[str, tuple[LimitState, ...]]]:
    """Yield the states of limits of 100 tokens, by what is left of each."""
    for subject, remaining in left.items():
        yield subject, (LimitState("tokens_per_day", 100, remaining, 0, 5.0),)


async def test_the_fullest_have_series_of_their_own_and_the_others_share_one() -> None:
    values: dict[tuple[str, ...], float] = {}
    left = {"tenant a": 10, "key b": 60, "tenant c": 70}
    metrics = QuotaMetrics(lambda: states(left), 1, meters(values))
    await metrics.report()
    assert values == {
        (NAME, "tenant a", "tokens_per_day"): 0.9,
        (NAME, "other", "tokens_per_day"): 0.4,
    }


async def test_nothing_is_used_of_a_limit_that_is_gone() -> None:
    values: dict[tuple[str, ...], float] = {}
    left = {"tenant a": 5, "key b": 10}
    metrics = QuotaMetrics(lambda: states(left), 1, meters(values))
    await metrics.report()
    left.clear()
    await metrics.report()
    assert values == {
        (NAME, "tenant a", "tokens_per_day"): 0.0,
        (NAME, "other", "tokens_per_day"): 0.0,
    }
