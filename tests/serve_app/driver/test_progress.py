"""Progress displays, and the figures in them."""

import io
import sys

import pytest

from serve_app.driver.progress import Lines, Silent, eta, figures, open_progress, share
from serve_app.driver.run_stats import RunStats


@pytest.fixture
def stats(monkeypatch: pytest.MonkeyPatch) -> RunStats:
    """Statistics of 50 rows in 10 s."""
    monkeypatch.setattr(RunStats, "elapsed_s", property(lambda self: 10.0))
    stats = RunStats()
    stats.totals.rows = 50
    stats.totals.prompt_tokens = 1_000
    stats.in_flight = 3
    return stats


def test_figures(stats: RunStats) -> None:
    assert figures(stats) == "5.0 rows/s, 100 tok/s, 3 in flight"
    stats.retries = 2
    stats.totals.failed["invalid_row"] = 1
    stats.utilization.update([{"replica": "a", "batcher": {"busy_time_s": 0.0, "idle_time_s": 0.0}}])
    stats.utilization.update([{"replica": "a", "batcher": {"busy_time_s": 3.0, "idle_time_s": 1.0}}])
    assert figures(stats) == "5.0 rows/s, 100 tok/s, 3 in flight, batcher 75% busy, 2 retries, 1 failed"


@pytest.mark.parametrize(
    ("done", "total", "text"), [(5, None, "5"), (5, 1_000, "5/~1,000"), (1_000, 1_000, "1,000/1,000")]
)
def test_the_total_is_an_estimate_until_all_rows_are_read(done: int, total: int | None, text: str) -> None:
    assert share(done, total) == text


@pytest.mark.parametrize(
    ("done", "total", "text"), [(50, None, "?"), (50, 100, "0:10"), (50, 40_000, "2:13:10"), (50, 50, "0:00")]
)
def test_the_time_to_the_end(stats: RunStats, done: int, total: int | None, text: str) -> None:
    assert eta(stats, done, total) == text


def test_lines_are_periodic_and_a_note_is_printed_once(
    stats: RunStats, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    times = iter((0.0, 1.0, 2.0, 11.0, 11.0, 12.0))
    monkeypatch.setattr("serve_app.driver.progress.time.monotonic", lambda: next(times))
    lines = Lines()
    for _ in range(4):
        lines.update(stats, 10, 100, "trying again: gone")
    assert capsys.readouterr().err.splitlines() == [
        "trying again: gone",
        "60/~100 rows, 5.0 rows/s, 100 tok/s, 3 in flight, ETA 0:08",
    ]


def test_the_display_fits_standard_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    assert isinstance(open_progress(quiet=False), Lines)
    assert isinstance(open_progress(quiet=True), Silent)
