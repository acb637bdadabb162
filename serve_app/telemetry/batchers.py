"""Metrics of a batcher, from its statistics."""

from collections import deque
from typing import TypeVar

from batcher import BatchStats, ContinuousBatcher, ContinuousStats, DynamicBatcher, Observation, Stats
from serve_app.api.scheduling import TIERS, tier
from serve_app.telemetry import catalogue
from serve_app.telemetry.catalogue import Metric
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import TenantLabels

ItemT = TypeVar("ItemT")

OUTCOMES = ("completed", "failed", "cancelled", "expired", "rejected")


def metrics_of(batcher: ContinuousBatcher | DynamicBatcher[object, object]) -> tuple[Metric, ...]:
    """Return the metrics of a batcher of this kind."""
    kind = catalogue.LLM if isinstance(batcher, ContinuousBatcher) else catalogue.FUNCTION
    return (*catalogue.BATCHER, *kind)


def _taken(kept: deque[ItemT]) -> list[ItemT]:
    """Return the items since the last call."""
    items = list(kept)
    kept.clear()
    return items


class BatcherMetrics:
    """Records a batcher's statistics, and the records that have ended since the last call.

    Args:
        model: Id of the model, for labels.
        batcher: The batcher.
        meters: Instruments of `metrics_of(batcher)`.
        tenants: Labels of tenants.
    """

    def __init__(
        self,
        model: str,
        batcher: ContinuousBatcher | DynamicBatcher[object, object],
        meters: Meters,
        tenants: TenantLabels,
    ) -> None:
        self._model = model
        self._batcher = batcher
        self._observed = batcher.observe()
        self._meters = meters
        self._tenants = tenants

    def __call__(self) -> None:
        stats = self._batcher.stats
        self._gauges(stats)
        self._counters(stats)
        self._records(_taken(self._observed.records))
        if isinstance(stats, ContinuousStats):
            self._window(stats)
        if isinstance(stats, BatchStats):
            self._batches(stats)

    def _gauges(self, stats: Stats) -> None:
        record, model = self._meters.record, self._model
        for priority in {*TIERS, *stats.queue_classes}:
            records, cost = stats.queue_classes.get(priority, (0, 0))
            record(catalogue.QUEUE_RECORDS, records, model, tier(priority))
            record(catalogue.QUEUE_COST, cost, model, tier(priority))
        record(catalogue.QUEUE_OUTSIDE, stats.outside, model)
        record(catalogue.WAIT_ESTIMATE, self._batcher.estimate_wait(0), model)
        record(catalogue.RUNNING_RECORDS, stats.running, model)
        record(catalogue.RUNNING_COST, stats.running_cost, model)

    def _counters(self, stats: Stats) -> None:
        count, model = self._meters.count, self._model
        count(catalogue.BUSY, stats.busy_time_s, model)
        for outcome in OUTCOMES:
            count(catalogue.RECORDS_ENDED, getattr(stats, f"total_{outcome}"), model, outcome)

    def _window(self, stats: ContinuousStats) -> None:
        self._meters.record(catalogue.CAPACITY, stats.capacity, self._model)
        if stats.max_running is not None:
            self._meters.record(catalogue.RUNNING_LIMIT, stats.max_running, self._model)
        self._meters.record(catalogue.BACKGROUND_RECORDS, stats.background_running, self._model)
        elapsed = stats.busy_time_s + stats.idle_time_s
        self._meters.count(catalogue.BUDGET_USED, stats.occupancy * elapsed, self._model)

    def _batches(self, stats: BatchStats) -> None:
        meters, model = self._meters, self._model
        for batch in _taken(self._observed.batches):
            meters.record(catalogue.BATCH_RECORDS, batch.size, model)
            meters.record(catalogue.BATCH_COST, batch.cost, model)
        meters.count(catalogue.BATCHED_COST, stats.total_batch_cost, model)
        meters.count(catalogue.PADDED_COST, stats.total_padded_cost, model)

    def _records(self, records: list[Observation]) -> None:
        meters, model = self._meters, self._model
        used: dict[str, list[float]] = {}
        for tenant, priority, cost, wait_s, run_s, _ in records:
            meters.record(catalogue.WAIT_SECONDS, wait_s, model, tier(priority))
            meters.record(catalogue.RUN_SECONDS, run_s, model)
            sums = used.setdefault(tenant, [0, 0, 0.0])
            sums[0] += 1
            sums[1] += cost
            sums[2] += wait_s
        self._tenants.round({tenant: int(sums[1]) for tenant, sums in used.items()})
        for tenant, sums in used.items():
            label = self._tenants.label(tenant)
            for metric, value in zip(
                (catalogue.TENANT_RECORDS, catalogue.TENANT_COST, catalogue.TENANT_WAIT), sums, strict=True
            ):
                if value > 0:
                    meters.record(metric, value, model, label)
