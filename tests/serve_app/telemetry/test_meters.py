"""Counters that follow a total, and histograms that are exported."""

from serve_app.telemetry import catalogue
from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments

METRIC = Metric("seconds", "histogram", "Seconds", ("model", "tier"), (0.5, 1.0, 10.0))


def test_a_counter_grows_by_the_growth_of_the_total() -> None:
    instruments = Instruments()
    meters = Meters([catalogue.BUSY], instruments.make)
    for total in (0, 1, 3, 3, 7):
        meters.count(catalogue.BUSY, total, "m")
    assert instruments.of(catalogue.BUSY, "m") == [1, 2, 4]


def test_each_series_of_a_counter_has_a_total_of_its_own() -> None:
    instruments = Instruments()
    meters = Meters([catalogue.BUSY], instruments.make)
    for total in (2, 5):
        meters.count(catalogue.BUSY, total, "a")
        meters.count(catalogue.BUSY, 10 * total, "b")
    assert instruments.of(catalogue.BUSY, "a") == [2, 3]
    assert instruments.of(catalogue.BUSY, "b") == [20, 30]


def test_histograms_are_exported_with_a_report() -> None:
    instruments = Instruments()
    meters = Meters(
        [METRIC],
        lambda metric: Histogram(metric, instruments.make) if metric.buckets else instruments.make(metric),
    )
    meters.record(METRIC, 3.0, "m", "flex")
    assert not instruments.values
    meters.report()
    assert instruments.values["seconds_sum", ("m", "flex")] == [3.0]
