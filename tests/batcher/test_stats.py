"""Statistics: figures that are right, and a report that can be read."""

import dataclasses
import json

from batcher import BatchStats, ContinuousBatcher, ContinuousStats
from batcher.stats import RECENT, Recorder, percentiles


def test_percentiles_by_nearest_rank() -> None:
    assert percentiles([], (0.5, 0.99)) == [0.0, 0.0]
    assert percentiles([7.0], (0.0, 0.5, 1.0)) == [7.0, 7.0, 7.0]
    assert percentiles(range(100, 0, -1), (0.5, 0.9, 0.99)) == [51, 91, 100]


def test_time_is_busy_or_idle_only_while_open() -> None:
    recorder = Recorder()

    def times(now: float) -> tuple[float, float]:
        found = recorder.common(now)
        return found["busy_time_s"], found["idle_time_s"]

    recorder.switch(True, 5.0)
    recorder.switch(False, 9.0)
    assert times(9.0) == (0.0, 0.0)
    recorder.open(10.0)
    recorder.switch(True, 11.0)
    assert times(13.0) == (2.0, 1.0)
    recorder.switch(False, 14.0)
    recorder.close(15.0)
    assert times(99.0) == (3.0, 2.0)
    recorder.open(100.0)
    assert times(101.0) == (3.0, 3.0)


def test_percentiles_are_over_recent_records() -> None:
    recorder = Recorder()
    recorder.ran(100, [0.0] * 100, 9.0)
    recorder.ran(RECENT, [0.0] * RECENT, 1.0)
    assert recorder.common(0.0)["run_p99_s"] == 1.0


async def test_first_tokens_are_timed_from_submission_for_records_that_tell_them() -> None:
    now = 10.0
    async with ContinuousBatcher(capacity=100, clock=lambda: now) as batcher:
        async with batcher.slot(prompt_tokens=10, max_tokens=10) as slot:
            slot.report(3)
        assert (batcher.stats.ttft_p50_s, batcher.stats.ttft_p99_s) == (None, None)
        for seconds in (1.0, 3.0, 2.0):
            async with batcher.slot(prompt_tokens=10, max_tokens=10) as slot:
                now += seconds
                slot.first_token()
                now += 50.0
                # The second piece of a stream is no first token.
                slot.first_token()
        assert (batcher.stats.ttft_p50_s, batcher.stats.ttft_p99_s) == (2.0, 3.0)


def test_first_tokens_are_those_of_recent_records() -> None:
    recorder = Recorder()
    for seconds in (*[9.0] * 100, *[1.0] * RECENT):
        recorder.first_token(seconds)
    assert recorder.first_tokens() == {"ttft_p50_s": 1.0, "ttft_p99_s": 1.0}


def test_snapshots_are_plain_data() -> None:
    for stats in (BatchStats(total_batches=3), ContinuousStats(capacity=5)):
        assert json.loads(json.dumps(dataclasses.asdict(stats)))["total_submitted"] == 0


def test_the_report_has_a_line_for_each_figure_in_its_unit() -> None:
    stats = BatchStats(
        total_submitted=12_000,
        queue_classes={0: (5, 500), 1: (2, 200)},
        busy_time_s=95.5,
        idle_time_s=4.5,
        throughput=119.04,
        avg_latency_s=0.25,
        wait_p50_s=0.0005,
        padding_ratio=0.082,
    )
    lines = stats.report().splitlines()
    for line in (
        "total_submitted    12,000",
        "queue_classes      0: 5 records, cost 500, 1: 2 records, cost 200",
        "busy_time_s        95.50 s",
        "utilization        95.5%",
        "throughput         119.0",
        "avg_latency_s      250.0 ms",
        "wait_p50_s         500 µs",
        "run_p50_s          0 µs",
        "padding_ratio      8.2%",
    ):
        assert line in lines
    assert len(lines) == len(dataclasses.fields(stats))


def test_the_report_leaves_out_what_there_is_not() -> None:
    report = ContinuousStats(capacity=40_000, occupancy=0.5, ttft_p50_s=2.0).report()
    assert "occupancy           50.0%" in report
    assert "ttft_p50_s          2.00 s" in report
    assert not {"queue_classes", "max_running", "ttft_p99_s"} & {
        line.split()[0] for line in report.splitlines()
    }
