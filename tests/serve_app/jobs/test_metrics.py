from serve_app.api.protocol import JSON
from serve_app.jobs.service import BatchesMetrics
from serve_app.telemetry import catalogue
from serve_app.telemetry.meters import Meters

STATS: JSON = {
    "batches": {"validating": 1, "in_progress": 2, "finalizing": 0, "cancelling": 0},
    "rows": {"waiting": 5, "in_flight": 3, "completed": 7, "failed": 1},
    "eta_s": None,
    "oldest_s": 60,
    "late": 1,
    "bytes": 1000,
}


async def test_statistics_become_metrics() -> None:
    values: dict[tuple[str, ...], float] = {}

    def make(metric: catalogue.Metric):  # type: ignore[no-untyped-def]
        def record(value: float, labels: dict[str, str]) -> None:
            key = (metric.name, *labels.values())
            values[key] = values.get(key, 0) + value if metric.kind == "counter" else value

        return record

    async def stats() -> JSON:
        return STATS

    metrics = BatchesMetrics(stats, Meters(catalogue.BATCHES, make))
    await metrics.report()
    await metrics.report()
    assert values == {
        ("saturate_batches_open", "validating"): 1,
        ("saturate_batches_open", "in_progress"): 2,
        ("saturate_batches_open", "finalizing"): 0,
        ("saturate_batches_open", "cancelling"): 0,
        ("saturate_batches_rows", "waiting"): 5,
        ("saturate_batches_rows", "in_flight"): 3,
        ("saturate_batches_rows_total", "completed"): 7,
        ("saturate_batches_rows_total", "failed"): 1,
        ("saturate_batches_oldest_seconds",): 60,
        ("saturate_batches_left_seconds",): 0,
        ("saturate_batches_late",): 1,
        ("saturate_batches_file_bytes",): 1000,
    }
