"""The display, the report and the metrics of a run."""

import json
from pathlib import Path

import pytest

from batcher import ContinuousStats
from serve_app.api.protocol import JSON
from serve_app.dataset.command import RunMetrics
from serve_app.dataset.errors import OutputError
from serve_app.dataset.progress import Shown, eta, run_shown, share
from serve_app.dataset.report import report, table, write_report
from serve_app.dataset.stats import RunStats
from serve_app.rows.rows import Result, RowTokens
from serve_app.stats import ReplicaStats
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters
from tests.serve_app.telemetry.instruments import Instruments

ROW = Result(0, b"", False, tokens=RowTokens(5, 0, 2))
FAILED = Result(1, b'{"error": {"type": "template_error"}}', True)
TOTALS: JSON = {"rows": 3, "with_result": 2, "failed": 1, "failed_by_type": {"template_error": 1}}


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
    assert run_shown(stats, 10, 100) == Shown(f"60/~100 rows, {figures}, ETA 0:08", 60, 100)
    stats.retries = 2
    stats.failed["invalid_row"] = 1
    stats.utilization.update([replica(0.0, 0.0)])
    stats.utilization.update([replica(3.0, 1.0)])
    text = f"50 rows, {figures}, batcher 75% busy, 2 retries, 1 failed, ETA ?"
    assert run_shown(stats, 0, None, "note") == Shown(text, 50, None, "note")


@pytest.mark.parametrize(
    ("done", "total", "text"), [(5, None, "5"), (5, 1_000, "5/~1,000"), (1_000, 1_000, "1,000/1,000")]
)
def test_the_total_is_an_estimate_until_all_rows_are_read(done: int, total: int | None, text: str) -> None:
    assert share(done, total) == text


@pytest.mark.parametrize(
    ("done", "total", "text"), [(50, None, "?"), (50, 100, "0:10"), (50, 40_000, "2:13:10"), (50, 50, "0:00")]
)
def test_the_time_to_the_end(done: int, total: int | None, text: str) -> None:
    assert eta(done, total, 5.0) == text


def test_a_report_is_written_as_json(tmp_path: Path) -> None:
    body = report(tmp_path / "out.jsonl", "failed", 1, RunStats().body(), TOTALS, "gone")
    path = tmp_path / "report.json"
    write_report(path, body)
    assert json.loads(path.read_text()) == body
    assert (body["outcome"], body["message"], body["rows_before"]) == ("failed", "gone", 1)
    with pytest.raises(OutputError, match="there is no folder"):
        write_report(tmp_path / "no" / "report.json", body)


def test_the_table_has_a_line_per_figure() -> None:
    stats = RunStats()
    stats.add([ROW, FAILED])
    stats.latencies.add(0.25)
    stats.calls, stats.retries = 1, 3
    lines = table(report(Path("out.jsonl"), "complete", 1, stats.body(), TOTALS))
    found = dict(line.split("  ", 1) for line in lines.splitlines() if not line.startswith("  "))
    assert found["rows"].strip() == "3: 2 with a result, 1 failed"
    assert found["this run"].strip() == "2 rows; 1 were done before"
    assert found["tokens"].strip() == "5 in, 2 out"
    assert found["calls"].strip() == "1 answered, 3 further tries; p50 250 ms, p90 250 ms, p99 250 ms"
    assert "  template_error" in lines
    assert "batcher" not in found


def test_the_table_of_a_run_without_rows_leaves_rates_out() -> None:
    none = TOTALS | {"rows": 0, "failed_by_type": {}}
    lines = table(report(Path("out.jsonl"), "interrupted", 0, RunStats().body(), none))
    assert "throughput" not in lines
    assert "calls" not in lines


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
