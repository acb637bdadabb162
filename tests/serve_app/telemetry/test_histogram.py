"""A histogram as Prometheus has it, out of gauges."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.recording import Instruments

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
    told = Instruments()
    histogram = Histogram(METRIC, told.make)
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
            assert told.told["seconds_bucket", (*labels, str(bound))][-1] == at_most(all_values, bound)
        assert told.told["seconds_bucket", (*labels, "+Inf")][-1] == len(all_values)
        assert told.told["seconds_count", labels][-1] == len(all_values)
        assert abs(told.told["seconds_sum", labels][-1] - sum(all_values)) < 1e-9
    assert len(told.told) == len(values) * (len(BOUNDS) + 3)


def test_what_has_not_changed_is_told_again() -> None:
    told = Instruments()
    histogram = Histogram(METRIC, told.make)
    histogram(1.0, {"model": "a", "tier": "flex"})
    histogram.report()
    histogram(1.0, {"model": "b", "tier": "flex"})
    histogram.report()
    assert told.told["seconds_count", ("a", "flex")] == [1, 1]
    assert told.told["seconds_bucket", ("a", "flex", "1.0")] == [1, 1]
    assert told.told["seconds_count", ("b", "flex")] == [1]


def test_meters_report_their_histograms() -> None:
    told = Instruments()

    meters = Meters(
        [METRIC], lambda metric: Histogram(metric, told.make) if metric.buckets else told.make(metric)
    )
    meters.record(METRIC, 3.0, "m", "flex")
    assert not told.told
    meters.report()
    assert told.told["seconds_sum", ("m", "flex")] == [3.0]
