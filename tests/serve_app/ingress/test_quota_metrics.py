"""Used shares of limits as metrics, with a bounded number of series."""

from serve_app.ingress.quota_metrics import QuotaMetrics
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from serve_app.usage.messages import LimitState


def test_the_fullest_have_series_of_their_own_and_the_others_share_one() -> None:
    values: dict[tuple[str, ...], float] = {}

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            values[metric.name, *labels.values()] = value

        return record

    def states() -> dict[str, tuple[LimitState, ...]]:
        left = {"tenant a": 10, "key b": 60, "tenant c": 70}
        return {
            subject: (LimitState("tokens_per_day", 100, remaining, 0, 5.0),)
            for subject, remaining in left.items()
        }

    metrics = QuotaMetrics(states, 1, Meters(catalogue.QUOTAS, make))
    metrics.report()
    name = "saturate_quota_used_ratio"
    assert values == {
        (name, "tenant a", "tokens_per_day"): 0.9,
        (name, "other", "tokens_per_day"): 0.4,
    }
