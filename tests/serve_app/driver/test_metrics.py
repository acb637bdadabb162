"""What a driver tells the metrics of the cluster."""

from serve_app.driver.metrics import RunMetrics
from serve_app.driver.run_stats import RunStats
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments


def test_progress_is_told_as_it_is_made() -> None:
    told, stats = Instruments(), RunStats()
    tell = RunMetrics("demo", Meters(catalogue.DRIVER, told.make))
    tell(stats)
    assert told.series(catalogue.DRIVER_ROWS) == set()
    row = {"error": None, "prompt_tokens": 5, "completion_tokens": 2}
    failed = {"error": {"type": "template_error"}, "prompt_tokens": None, "completion_tokens": None}
    for _ in range(2):
        stats.totals.add(row)
        stats.totals.add(row)
        stats.totals.add(failed)
        stats.retries += 1
        stats.in_flight = 3
        tell(stats)
        tell(stats)
    assert told.total(catalogue.DRIVER_ROWS, "demo", "done") == 4
    assert told.total(catalogue.DRIVER_ROWS, "demo", "failed") == 2
    assert told.total(catalogue.DRIVER_TOKENS, "demo") == 28
    assert told.total(catalogue.DRIVER_RETRIES, "demo") == 2
    assert told.of(catalogue.DRIVER_CALLS, "demo")[-1] == 3
