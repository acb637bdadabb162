"""Statistics of a run."""

from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.driver.run_stats import SAMPLE, Latencies, RunStats, Totals, Utilization
from serve_app.jobs.pacing import EngineLoad


def replica(name: str, busy_s: float, idle_s: float, running: int = 0, waiting: int = 0) -> JSON:
    times = {"busy_time_s": busy_s, "idle_time_s": idle_s}
    return {"replica": name, "batcher": times | {"running": running, "queue_depth": waiting}}


def test_totals_count_rows_tokens_and_errors_by_type() -> None:
    totals = Totals()
    totals.add({"error": None, "prompt_tokens": 5, "completion_tokens": 2})
    totals.add({"error": {"type": "invalid_row"}, "prompt_tokens": None, "completion_tokens": None})
    assert totals.body() == {
        "rows": 2,
        "with_result": 1,
        "failed": 1,
        "failed_by_type": {"invalid_row": 1},
        "prompt_tokens": 5,
        "completion_tokens": 2,
    }


def test_utilization_is_that_of_the_run_over_all_replicas() -> None:
    utilization = Utilization()
    assert utilization.share is None
    utilization.update([replica("a", 100, 900), replica("b", 0, 0)])
    assert utilization.share is None
    # A replica that comes later counts from its first statistics on.
    utilization.update([replica("a", 109, 901, 4, 2), replica("b", 2, 8, 1), replica("c", 50, 50)])
    assert utilization.share == pytest.approx(11 / 20)
    assert (utilization.load, utilization.replicas) == (EngineLoad(5, 2), 3)


@pytest.mark.parametrize(
    "replica",
    [{}, {"replica": "b"}, {"replica": "b", "batcher": {"running": 1}}, {"replica": "b", "batcher": None}, 5],
)
def test_statistics_of_another_form_are_left_out(replica: Any) -> None:
    used = Utilization()
    batcher = {"busy_time_s": 1.0, "idle_time_s": 1.0, "running": 2, "queue_depth": 3}
    used.update([{"replica": "a", "batcher": batcher}])
    used.update([{"replica": "a", "batcher": batcher | {"busy_time_s": 2.0}}, replica])
    assert (used.replicas, used.load.running, used.share) == (1, 2, None)
    used.update([{"replica": "a", "batcher": batcher | {"busy_time_s": 2.0}}])
    assert used.share == 1.0


def test_percentiles_of_latencies() -> None:
    latencies = Latencies()
    assert latencies.percentiles() == {"p50_s": None, "p90_s": None, "p99_s": None}
    for seconds in range(100, -1, -1):
        latencies.add(seconds)
    assert latencies.percentiles() == {"p50_s": 50, "p90_s": 90, "p99_s": 99}


def test_a_long_run_keeps_a_uniform_sample() -> None:
    latencies = Latencies()
    for number in range(5 * SAMPLE):
        latencies.add(number)
    median = latencies.percentiles()["p50_s"]
    assert median == pytest.approx(2.5 * SAMPLE, rel=0.1)


def test_the_clock_stops_at_the_end() -> None:
    stats = RunStats()
    stats.totals.rows = 10
    stats.end()
    assert stats.elapsed_s == stats.elapsed_s
    assert stats.body()["rows_per_s"] == round(stats.rows_per_s, 2)
