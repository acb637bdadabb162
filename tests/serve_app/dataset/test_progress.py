"""The display and the metrics of a run."""

import pytest

from batcher import ContinuousStats
from serve_app.dataset.command import RunMetrics
from serve_app.dataset.progress import run_shown
from serve_app.dataset.stats import RunStats
from serve_app.rows.rows import Result, RowTokens
from serve_app.stats import ReplicaStats
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments

ROW = Result(0, b"", False, tokens=RowTokens(5, 0, 2))
FAILED = Result(1, b'{"error": {"type": "template_error"}}', True)


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> RunStats:
    """Statistics of 50 rows in 10 s."""
    monkeypatch.setattr(RunStats, "elapsed_s", property(lambda self: 10.0))
    stats = RunStats()
    stats.rows = 50
    stats.prompt_tokens = 1_000
    stats.in_flight = 3
    return stats


def replica(busy_s: float, idle_s: float) -> ReplicaStats:
    return ReplicaStats(replica="a", batcher=ContinuousStats(busy_time_s=busy_s, idle_time_s=idle_s))


def test_figures(stats: RunStats) -> None:
    figures = "5.0 rows/s, 100 tok/s, 3 in flight"
    assert run_shown(stats, 10, 100)[:3] == (f"60/~100 rows, {figures}, ETA 0:08", 60, 100)
    stats.retries = 2
    stats.failed["invalid_row"] = 1
    stats.utilization.update([replica(0.0, 0.0)])
    stats.utilization.update([replica(3.0, 1.0)])
    text = f"50 rows, {figures}, batcher 75% busy, 2 retries, 1 failed, ETA ?"
    assert run_shown(stats, 0, None, "note")[:4] == (text, 50, None, "note")


@pytest.mark.parametrize(
    ("before", "total", "share", "eta"),
    [
        (0, None, "50", "?"),
        (0, 100, "50/~100", "0:10"),
        (0, 40_000, "50/~40,000", "2:13:10"),
        (950, 1_000, "1,000/1,000", "0:00"),
    ],
)
def test_the_total_is_an_estimate_until_all_rows_are_read(
    stats: RunStats, before: int, total: int | None, share: str, eta: str
) -> None:
    text = run_shown(stats, before, total).text
    assert text.startswith(f"{share} rows, ")
    assert text.endswith(f", ETA {eta}")


def test_rows_retries_and_calls_are_recorded_as_they_change() -> None:
    instruments, stats = Instruments(), RunStats()
    record = RunMetrics("demo", Meters(catalogue.DRIVER, instruments.make))
    record(stats)
    assert instruments.series(catalogue.DRIVER_ROWS) == set()
    for _ in range(2):
        stats.add([ROW, ROW, FAILED])
        stats.retries += 1
        stats.in_flight = 3
        record(stats)
        record(stats)
    assert instruments.total(catalogue.DRIVER_ROWS, "demo", "done") == 4
    assert instruments.total(catalogue.DRIVER_ROWS, "demo", "failed") == 2
    assert instruments.total(catalogue.DRIVER_TOKENS, "demo") == 28
    assert instruments.total(catalogue.DRIVER_RETRIES, "demo") == 2
    assert instruments.of(catalogue.DRIVER_CALLS, "demo")[-1] == 3
