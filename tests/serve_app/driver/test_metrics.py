"""Metrics of a run."""

from serve_app.driver.metrics import RunMetrics
from serve_app.driver.run_stats import RunStats
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments


def test_rows_retries_and_calls_are_recorded_as_they_change() -> None:
    instruments, stats = Instruments(), RunStats()
    record = RunMetrics("demo", Meters(catalogue.DRIVER, instruments.make))
    record(stats)
    assert instruments.series(catalogue.DRIVER_ROWS) == set()
    row = {"error": None, "prompt_tokens": 5, "completion_tokens": 2}
    failed = {"error": {"type": "template_error"}, "prompt_tokens": None, "completion_tokens": None}
    for _ in range(2):
        stats.totals.add(row)
        stats.totals.add(row)
        stats.totals.add(failed)
        stats.retries += 1
        stats.in_flight = 3
        record(stats)
        record(stats)
    assert instruments.total(catalogue.DRIVER_ROWS, "demo", "done") == 4
    assert instruments.total(catalogue.DRIVER_ROWS, "demo", "failed") == 2
    assert instruments.total(catalogue.DRIVER_TOKENS, "demo") == 28
    assert instruments.total(catalogue.DRIVER_RETRIES, "demo") == 2
    assert instruments.of(catalogue.DRIVER_CALLS, "demo")[-1] == 3
