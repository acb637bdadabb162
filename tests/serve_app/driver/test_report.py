"""Reports: the JSON, and the table made from it."""

import json
from pathlib import Path

import pytest

from serve_app.dataset.errors import OutputError
from serve_app.driver.report import report, table, write_report
from serve_app.driver.run_stats import RunStats, Totals

ROW = {"error": None, "prompt_tokens": 5, "completion_tokens": 2}
FAILED = {"error": {"type": "template_error"}, "prompt_tokens": None, "completion_tokens": None}


def totals(*rows: object) -> Totals:
    found = Totals()
    for row in rows:
        found.add(row)  # type: ignore[arg-type]
    return found


def test_a_report_is_written_as_json(tmp_path: Path) -> None:
    body = report(tmp_path / "out.jsonl", "failed", 1, RunStats().body(), totals(ROW).body(), "gone")
    path = tmp_path / "report.json"
    write_report(path, body)
    assert json.loads(path.read_text()) == body
    assert (body["outcome"], body["message"], body["rows_before"]) == ("failed", "gone", 1)
    with pytest.raises(OutputError, match="there is no folder"):
        write_report(tmp_path / "no" / "report.json", body)


def test_the_table_has_a_line_per_figure() -> None:
    stats = RunStats()
    stats.totals = totals(ROW, FAILED)
    stats.latencies.add(0.25)
    stats.calls, stats.retries = 1, 3
    lines = table(report(Path("out.jsonl"), "complete", 1, stats.body(), totals(ROW, ROW, FAILED).body()))
    found = dict(line.split("  ", 1) for line in lines.splitlines() if not line.startswith("  "))
    assert found["rows"].strip() == "3: 2 with a result, 1 failed"
    assert found["this run"].strip() == "2 rows; 1 were done before"
    assert found["tokens"].strip() == "5 in, 2 out"
    assert found["calls"].strip() == "1 answered, 3 sent again; p50 250 ms, p90 250 ms, p99 250 ms"
    assert "  template_error" in lines
    assert "batcher" not in found


def test_the_table_of_a_run_without_rows_leaves_rates_out() -> None:
    lines = table(report(Path("out.jsonl"), "interrupted", 0, RunStats().body(), Totals().body()))
    assert "throughput" not in lines
    assert "calls" not in lines
