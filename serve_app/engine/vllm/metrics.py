"""vLLM's own metrics on Ray's endpoint, at the pace of a scrape instead of that of the engine's steps.

The imports are those of vLLM 0.32.
"""

import dataclasses
import logging
from copy import copy
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.ray_wrappers import RayGaugeWrapper, RayPrometheusStatLogger
from vllm.v1.metrics.stats import IterationStats, PrefixCacheStats, PromptTokenStats, SchedulerStats

from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.histogram import Histogram, Instrument

logger = logging.getLogger("ray.serve")

PER_REQUEST = (
    "finished_requests",
    "max_num_generation_tokens_iter",
    "n_params_iter",
    "time_to_first_tokens_iter",
)
"""Lists in the statistics of a step."""

COUNTS = ("num_generation_tokens", "num_preempted_reqs", "num_corrupted_reqs")
"""Counts in the statistics of a step."""

OF_ONE_STEP = (
    "connector_prefix_cache_stats",
    "spec_decoding_stats",
    "kv_connector_stats",
    "ec_connector_stats",
    "perf_stats",
)
"""Statistics of the scheduler that can't be added up over steps."""

HISTOGRAMS = (
    "histogram_time_to_first_token",
    "histogram_request_time_per_output_token",
    "histogram_e2e_time_request",
)
"""The histograms of vLLM that are kept, by their attributes: those that the dashboard shows."""

MAX_PENDING = 10_000
"""Finished requests that are kept between two reports at most."""

TOKEN_COUNTS = tuple(field.name for field in dataclasses.fields(PromptTokenStats))


def _gauge(metric: Metric) -> Instrument:
    gauge = RayGaugeWrapper(metric.name, metric.help, list(metric.labels))
    return lambda value, labels: gauge.labels(**labels).set(value)


class _Histogram:
    """A histogram with the interface that vLLM expects."""

    def __init__(self, name: str, documentation: str, labelnames: list[str], buckets: list[float]) -> None:
        metric = Metric(name, "histogram", documentation, tuple(labelnames), tuple(map(float, buckets)))
        self._labelnames = labelnames
        self._labels: dict[str, str] = {}
        self._histogram = Histogram(metric, _gauge)
        self.report = self._histogram.report

    def labels(self, *values: Any) -> "_Histogram":
        series = copy(self)
        series._labels = dict(zip(self._labelnames, map(str, values), strict=True))
        return series

    def observe(self, value: float) -> None:
        self._histogram(value, self._labels)


class _Ignored:
    """A histogram that drops its values."""

    def observe(self, value: float) -> None:
        pass


class EngineMetrics(RayPrometheusStatLogger):  # type: ignore[misc]
    """vLLM's metrics through Ray, many steps at a time.

    vLLM reports some twenty values per step and one per token, and each takes Ray 3 µs. Here a step is only
    added to those before it, and `flush` reports them together. Most of its histograms, 16 values per
    request, are left out.

    An error that left `record` would end the engine; it ends the metrics instead.
    """

    _histogram_cls = _Histogram

    def __init__(self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None) -> None:
        super().__init__(vllm_config, engine_indexes)
        for name in [name for name in vars(self) if name.startswith("histogram_")]:
            if name not in HISTOGRAMS:
                setattr(self, name, dict.fromkeys(engine_indexes or [0], _Ignored()))
        self._schedulers = {index: SchedulerStats() for index in engine_indexes or [0]}
        self._caches = {index: PrefixCacheStats() for index in self._schedulers}
        self._iterations: dict[int, IterationStats] = {}
        self._failed = False

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration_stats: IterationStats | None,
        mm_cache_stats: Any = None,
        engine_idx: int = 0,
    ) -> None:
        """Add a step of an engine."""
        if self._failed:
            return
        try:
            if iteration_stats is not None:
                self._add_iteration(engine_idx, iteration_stats)
            if scheduler_stats is not None:
                self._add_scheduler(engine_idx, scheduler_stats)
        except Exception:
            # `_fail` logs the stack.
            self._fail()

    def flush(self) -> None:
        """Report the steps since the last call, and the current state."""
        if self._failed:
            return
        try:
            for index, scheduler in self._schedulers.items():
                cache, self._caches[index] = self._caches[index], PrefixCacheStats()
                step = dataclasses.replace(scheduler, prefix_cache_stats=cache)
                super().record(step, self._iterations.pop(index, None), None, index)
                # Counts are reported once.
                once = dict.fromkeys(OF_ONE_STEP) | {"kv_cache_eviction_events": []}
                self._schedulers[index] = dataclasses.replace(scheduler, **once)
            for name in HISTOGRAMS:
                # The histogram of one engine has the series of all.
                next(iter(getattr(self, name).values())).report()
        except Exception:
            # `_fail` logs the stack.
            self._fail()

    def _add_scheduler(self, index: int, step: SchedulerStats) -> None:
        # Other loggers read the step too: it isn't changed.
        self._schedulers[index] = step
        cache = self._caches[index]
        cache.queries += step.prefix_cache_stats.queries
        cache.hits += step.prefix_cache_stats.hits
        if step.kv_cache_eviction_events or any(getattr(step, name) for name in OF_ONE_STEP):
            self.flush()

    def _add_iteration(self, index: int, step: IterationStats) -> None:
        total = self._iterations.get(index)
        if total is None:
            total = self._iterations[index] = IterationStats()
        for name in PER_REQUEST:
            if items := getattr(step, name):
                getattr(total, name).extend(items)
        for name in COUNTS:
            setattr(total, name, getattr(total, name) + getattr(step, name))
        tokens = step.prompt_token_stats
        if tokens.total:
            sums = total.prompt_token_stats
            for name in TOKEN_COUNTS:
                setattr(sums, name, getattr(sums, name) + getattr(tokens, name))
        if len(total.finished_requests) >= MAX_PENDING:
            self.flush()

    def _fail(self) -> None:
        self._failed = True
        logger.exception("vLLM's metrics fail, and are left out from now on")
