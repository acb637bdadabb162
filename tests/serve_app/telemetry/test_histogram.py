"""The series of a Prometheus histogram, made of gauges."""

from hypothesis import given
from hypothesis import strategies as st

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram
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


def test_series_without_a_change_are_set_again() -> None:
    instruments = Instruments()
    histogram = Histogram(METRIC, instruments.make)
    histogram(1.0, {"model": "a", "tier": "flex"})
    histogram.report()
    histogram(1.0, {"model": "b", "tier": "flex"})
    histogram.report()
    assert instruments.values["seconds_count", ("a", "flex")] == [1, 1]
    assert instruments.values["seconds_bucket", ("a", "flex", "1.0")] == [1, 1]
    assert instruments.values["seconds_count", ("b", "flex")] == [1]
