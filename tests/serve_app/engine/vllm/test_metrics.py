"""vLLM's statistics of many steps, reported together: nothing is lost and nothing is counted twice."""

from typing import Any

import pytest
from vllm.v1.metrics.ray_wrappers import RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, SchedulerStats

from serve_app.engine.vllm import metrics as vllm_metrics
from serve_app.engine.vllm.metrics import EngineMetrics
from tests.serve_app.telemetry.instruments import Instruments


@pytest.fixture
def reported(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, Any, int]]:
    """Values that would have gone to Ray."""
    told: list[tuple[Any, Any, int]] = []

    def record(
        self: object, scheduler: Any, iteration: Any, mm_cache: object = None, engine: int = 0
    ) -> None:
        told.append((scheduler, iteration, engine))

    monkeypatch.setattr(RayPrometheusStatLogger, "__init__", init)
    monkeypatch.setattr(RayPrometheusStatLogger, "record", record)
    return told


def init(self: Any, config: object, indexes: list[int]) -> None:
    """Make what vLLM makes of its histograms, among them one that isn't kept."""
    for name in (*vllm_metrics.HISTOGRAMS, "histogram_queue_time_request"):
        histogram = self._histogram_cls(f"vllm:{name}", "", ["model_name", "engine"], [1, 2.5])
        setattr(self, name, {index: histogram.labels("m", str(index)) for index in indexes})


def step(running: int, tokens: int) -> tuple[SchedulerStats, IterationStats]:
    """Return what vLLM reports of a step."""
    scheduler = SchedulerStats(num_running_reqs=running)
    scheduler.prefix_cache_stats.queries = 10
    scheduler.prefix_cache_stats.hits = 4
    iteration = IterationStats()
    iteration.num_generation_tokens = tokens
    iteration.prompt_token_stats.total = iteration.prompt_token_stats.computed = 7
    iteration.time_to_first_tokens_iter = [0.5]
    iteration.inter_token_latencies_iter = [0.1] * tokens
    return scheduler, iteration


def test_steps_are_added_up_and_reported_together(reported: list[tuple[Any, Any, int]]) -> None:
    metrics = EngineMetrics(None, [0])
    steps = [step(3, 2), step(4, 3)]
    for scheduler, iteration in steps:
        metrics.record(scheduler, iteration)
    metrics.record(SchedulerStats(num_running_reqs=1), None)
    assert reported == []
    metrics.flush()
    ((scheduler, total, engine),) = reported
    assert (scheduler.num_running_reqs, engine) == (1, 0)
    assert (scheduler.prefix_cache_stats.queries, scheduler.prefix_cache_stats.hits) == (20, 8)
    assert total.num_generation_tokens == 5
    assert total.num_prompt_tokens == 14
    assert total.time_to_first_tokens_iter == [0.5, 0.5]
    assert total.inter_token_latencies_iter == []
    # Other loggers get the same objects.
    assert steps[0][1].time_to_first_tokens_iter == [0.5]
    assert steps[0][0].prefix_cache_stats.queries == 10


def test_gauges_are_reported_again_and_counts_once(
    reported: list[tuple[Any, Any, int]],
) -> None:
    metrics = EngineMetrics(None, [0])
    metrics.record(*step(3, 2))
    metrics.flush()
    metrics.flush()
    scheduler, iteration, _ = reported[1]
    assert scheduler.num_running_reqs == 3
    assert scheduler.prefix_cache_stats.queries == 0
    assert iteration is None


def test_each_engine_has_series_of_its_own(reported: list[tuple[Any, Any, int]]) -> None:
    metrics = EngineMetrics(None, [0, 1])
    metrics.record(*step(3, 2), engine_idx=1)
    metrics.flush()
    assert [(scheduler.num_running_reqs, engine) for scheduler, _, engine in reported] == [(0, 0), (3, 1)]


def test_statistics_that_can_not_be_added_up_are_reported_at_once(
    reported: list[tuple[Any, Any, int]],
) -> None:
    metrics = EngineMetrics(None, [0])
    scheduler, iteration = step(3, 2)
    scheduler.kv_connector_stats = {"some": "thing"}
    metrics.record(scheduler, iteration)
    metrics.flush()
    assert [told.kv_connector_stats for told, _, _ in reported] == [{"some": "thing"}, None]


def test_values_that_are_never_flushed_are_bounded(
    reported: list[tuple[Any, Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_metrics, "MAX_PENDING", 3)
    metrics = EngineMetrics(None, [0])
    for _ in range(7):
        scheduler, iteration = step(1, 1)
        iteration.finished_requests = [object()]
        metrics.record(scheduler, iteration)
    assert [len(total.finished_requests) for _, total, _ in reported] == [3, 3]


def test_an_error_ends_the_metrics_and_not_the_engine(
    reported: list[tuple[Any, Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    logged: list[str] = []
    monkeypatch.setattr(vllm_metrics.logger, "exception", logged.append)
    metrics = EngineMetrics(None, [0])
    metrics.record(object(), object())
    metrics.record(*step(1, 1))
    metrics.flush()
    assert reported == []
    assert len(logged) == 1


def test_only_the_histograms_of_the_dashboard_are_kept(
    reported: list[tuple[Any, Any, int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    instruments = Instruments()
    monkeypatch.setattr(vllm_metrics, "_gauge", instruments.make)
    metrics = EngineMetrics(None, [0, 1])
    first_token = metrics.histogram_time_to_first_token
    observed: list[list[float]] = [[0.5, 2, 2.5, 9], [3]]
    for index, values in enumerate(observed):
        for value in values:
            first_token[index].observe(value)
            metrics.histogram_queue_time_request[index].observe(value)
    metrics.flush()
    name = "vllm:histogram_time_to_first_token"
    assert {(series, *labels): values for (series, labels), values in instruments.values.items()} == {
        (f"{name}_bucket", "m", "0", "1.0"): [1],
        (f"{name}_bucket", "m", "0", "2.5"): [3],
        (f"{name}_bucket", "m", "0", "+Inf"): [4],
        (f"{name}_sum", "m", "0"): [14],
        (f"{name}_count", "m", "0"): [4],
        (f"{name}_bucket", "m", "1", "1.0"): [0],
        (f"{name}_bucket", "m", "1", "2.5"): [0],
        (f"{name}_bucket", "m", "1", "+Inf"): [1],
        (f"{name}_sum", "m", "1"): [3],
        (f"{name}_count", "m", "1"): [1],
    }
