"""Instruments: counters that follow a total, and histograms made of gauges."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry import catalogue
from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments

BOUNDS = (0.5, 1.0, 10.0)
METRIC = Metric("seconds", "histogram", "Seconds", ("model", "tier"), BOUNDS)


def at_most(values: list[float], bound: float) -> int:
    return sum(value <= bound for value in values)


@given(
    st.lists(
        st.tuples(
            st.sampled_from("ab"), st.one_of(st.sampled_from(BOUNDS), st.floats(-1, 20)), st.booleans()
        ),
        max_size=50,
    )
)
def test_its_series_are_those_of_prometheus_whenever_it_reports(
    observed: list[tuple[str, float, bool]],
) -> None:
    instruments = Instruments()
    histogram = Histogram(METRIC, instruments.make)
    values: dict[str, list[float]] = {}
    for model, value, reports in observed:
        histogram(value, {"model": model, "tier": "flex"})
        values.setdefault(model, []).append(value)
        if reports:
            histogram.report()
    histogram.report()
    for model, all_values in values.items():
        labels = (model, "flex")
        for bound in BOUNDS:
            assert instruments.values["seconds_bucket", (*labels, str(bound))][-1] == at_most(
                all_values, bound
            )
        assert instruments.values["seconds_bucket", (*labels, "+Inf")][-1] == len(all_values)
        assert instruments.values["seconds_count", labels][-1] == len(all_values)
        assert abs(instruments.values["seconds_sum", labels][-1] - sum(all_values)) < 1e-9
    assert len(instruments.values) == len(values) * (len(BOUNDS) + 3)


def test_a_report_sets_all_series_again() -> None:
    instruments = Instruments()
    meters = Meters(
        [METRIC, catalogue.BUSY],
        lambda metric: Histogram(metric, instruments.make) if metric.buckets else instruments.make(metric),
    )
    meters.record(METRIC, 1.0, "a", "flex")
    assert not instruments.values
    meters.report()
    meters.record(METRIC, 1.0, "b", "flex")
    meters.report()
    assert instruments.values["seconds_count", ("a", "flex")] == [1, 1]
    assert instruments.values["seconds_bucket", ("a", "flex", "1.0")] == [1, 1]
    assert instruments.values["seconds_count", ("b", "flex")] == [1]


def test_each_series_of_a_counter_grows_by_the_growth_of_its_total() -> None:
    instruments = Instruments()
    meters = Meters([catalogue.BUSY], instruments.make)
    for total in (0, 2, 5, 5, 9):
        meters.count(catalogue.BUSY, total, "a")
        meters.count(catalogue.BUSY, 10 * total, "b")
    assert instruments.of(catalogue.BUSY, "a") == [2, 3, 4]
    assert instruments.of(catalogue.BUSY, "b") == [20, 30, 40]
