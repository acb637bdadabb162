"""Metrics of a batcher: they agree with its statistics, whenever they are read."""

import asyncio
from typing import Any

from batcher import ContinuousBatcher, DynamicBatcher
from serve_app.telemetry import catalogue
from serve_app.telemetry.batchers import BatcherMetrics, metrics_of
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import TenantLabels
from tests.fakes.clock import Clock
from tests.serve_app.telemetry.instruments import Instruments


def reporting(batcher: ContinuousBatcher | DynamicBatcher[Any, Any]) -> tuple[Instruments, BatcherMetrics]:
    instruments = Instruments()
    meters = Meters(metrics_of(batcher), instruments.make)
    return instruments, BatcherMetrics("m", batcher, meters, TenantLabels(20))


async def test_the_window_of_a_continuous_batcher() -> None:
    clock = Clock()
    async with ContinuousBatcher(capacity=100, max_running=8, clock=clock) as batcher:
        metrics, report = reporting(batcher)
        async with batcher.slot(prompt_tokens=40, max_tokens=10, tenant="a") as slot:
            waiting = [
                asyncio.ensure_future(batcher.submit(asyncio.sleep, 0, cost=60, priority=priority))
                for priority in (0, 1)
            ]
            await asyncio.sleep(0)
            report()
            assert metrics.of(catalogue.QUEUE_RECORDS, "m", "default") == [1]
            assert metrics.of(catalogue.QUEUE_COST, "m", "flex") == [60]
            assert metrics.of(catalogue.QUEUE_RECORDS, "m", "priority") == [0]
            assert metrics.of(catalogue.RUNNING_COST, "m") == [50]
            assert metrics.of(catalogue.CAPACITY, "m") == [100]
            assert metrics.of(catalogue.RUNNING_LIMIT, "m") == [8]
            clock.now = 4.0
            slot.report(7)
        for task in waiting:
            await (await task)
        report()
        assert metrics.of(catalogue.QUEUE_RECORDS, "m", "default") == [1, 0]
        assert metrics.total(catalogue.RECORDS_ENDED, "m", "completed") == 3
        assert metrics.total(catalogue.BUSY, "m") == 4.0
        assert metrics.total(catalogue.BUDGET_USED, "m") == 2.0
        assert sorted(metrics.of(catalogue.RUN_SECONDS, "m")) == [0.0, 0.0, 4.0]
        assert metrics.of(catalogue.WAIT_SECONDS, "m", "flex") == [4.0]
        assert metrics.total(catalogue.TENANT_COST, "m", "a") == 47
        assert metrics.total(catalogue.TENANT_RECORDS, "m", "default") == 2
        assert metrics.total(catalogue.TENANT_WAIT, "m", "default") == 8.0


async def test_a_tenant_by_any_name_is_counted_and_so_are_the_others() -> None:
    async with ContinuousBatcher(capacity=100, clock=Clock()) as batcher:
        metrics, report = reporting(batcher)
        for tenant in ("è\ud800", "a"):
            async with batcher.slot(10, tenant=tenant):
                pass
        report()
    assert metrics.total(catalogue.TENANT_RECORDS, "m", "\\xe8\\ud800") == 1
    assert metrics.total(catalogue.TENANT_RECORDS, "m", "a") == 1


async def test_rows_that_run_are_counted() -> None:
    async with ContinuousBatcher(capacity=100, background=1, clock=Clock()) as batcher:
        metrics, report = reporting(batcher)
        async with batcher.slot(10), batcher.slot(10, priority=1):
            report()
    assert metrics.of(catalogue.BACKGROUND_RECORDS, "m") == [1]
    assert metrics.of(catalogue.RUNNING_RECORDS, "m") == [2]


async def test_batches_are_reported_with_their_padding() -> None:
    async def process(batch: list[str]) -> list[str]:
        return batch

    async with DynamicBatcher(process, cost_estimator=len) as batcher:
        metrics, report = reporting(batcher)
        await asyncio.wait(await batcher.submit_batch(["a", "bbb"]))
        report()
        report()
        assert metrics.of(catalogue.BATCH_RECORDS, "m") == [2]
        assert metrics.of(catalogue.BATCH_COST, "m") == [4]
        assert metrics.total(catalogue.BATCHED_COST, "m") == 4
        assert metrics.total(catalogue.PADDED_COST, "m") == 6
        assert metrics.total(catalogue.RECORDS_ENDED, "m", "completed") == 2


async def test_records_are_counted_by_outcome() -> None:
    async def process(batch: list[str]) -> list[object]:
        return [ValueError(record) for record in batch]

    async with DynamicBatcher(process) as batcher:
        metrics, report = reporting(batcher)
        (future,) = await batcher.submit_batch(["x"])
        await asyncio.wait([future])
        assert future.exception()
        report()
        assert metrics.total(catalogue.RECORDS_ENDED, "m", "failed") == 1
        assert metrics.of(catalogue.RECORDS_ENDED, "m", "completed") == []
