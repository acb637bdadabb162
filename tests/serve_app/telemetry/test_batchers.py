"""A batcher's numbers as metrics: the same as its statistics, whenever they are read."""

import asyncio
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from batcher import ContinuousBatcher, DynamicBatcher, Goals
from serve_app.telemetry import catalogue
from serve_app.telemetry.batchers import BatcherMetrics, metrics_of
from serve_app.telemetry.meters import Meters
from serve_app.telemetry.tenants import OTHER, Tenants
from tests.serve_app.telemetry.recording import Instruments


def reporting(batcher: ContinuousBatcher | DynamicBatcher[Any, Any]) -> tuple[Instruments, BatcherMetrics]:
    instruments = Instruments()
    meters = Meters(metrics_of(batcher), instruments.make)
    return instruments, BatcherMetrics("m", batcher, meters, Tenants(20))


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


async def test_a_window_is_reported_as_it_is() -> None:
    clock = Clock()
    async with ContinuousBatcher(capacity=100, max_running=8, clock=clock) as batcher:
        told, report = reporting(batcher)
        async with batcher.slot(prompt_tokens=40, max_tokens=10, tenant="a") as slot:
            waiting = [
                asyncio.ensure_future(batcher.submit(asyncio.sleep, 0, cost=60, priority=priority))
                for priority in (0, 1)
            ]
            await asyncio.sleep(0)
            report()
            assert told.of(catalogue.QUEUE_RECORDS, "m", "default") == [1]
            assert told.of(catalogue.QUEUE_COST, "m", "flex") == [60]
            assert told.of(catalogue.QUEUE_RECORDS, "m", "priority") == [0]
            assert told.of(catalogue.RUNNING_COST, "m") == [50]
            assert told.of(catalogue.CAPACITY, "m") == [100]
            assert told.of(catalogue.RUNNING_LIMIT, "m") == [8]
            clock.now = 4.0
            slot.report(7)
        for task in waiting:
            await (await task)
        report()
        assert told.of(catalogue.QUEUE_RECORDS, "m", "default") == [1, 0]
        assert told.total(catalogue.RECORDS_ENDED, "m", "completed") == 3
        assert told.total(catalogue.BUSY, "m") == 4.0
        assert told.total(catalogue.BUDGET_USED, "m") == 2.0
        assert sorted(told.of(catalogue.RUN_SECONDS, "m")) == [0.0, 0.0, 4.0]
        assert told.of(catalogue.WAIT_SECONDS, "m", "flex") == [4.0]
        assert told.total(catalogue.TENANT_COST, "m", "a") == 47
        assert told.total(catalogue.TENANT_RECORDS, "m", "default") == 2
        assert told.total(catalogue.TENANT_WAIT, "m", "default") == 8.0


async def test_a_goal_is_reported_beside_what_is_expected() -> None:
    goals = Goals(ttft_p99_s=0.5)
    async with ContinuousBatcher(capacity=100, goals=goals, clock=Clock()) as batcher:
        told, report = reporting(batcher)
        batcher.step(0.1)
        async with batcher.slot(prompt_tokens=40, max_tokens=10, priority=1):
            report()
    assert told.of(catalogue.FIRST_TOKEN_GOAL, "m") == [0.5]
    assert told.of(catalogue.FIRST_TOKEN_EXPECTED, "m") == [batcher.stats.expected_ttft_s]
    assert told.of(catalogue.BACKGROUND_RECORDS, "m") == [1]
    assert told.of(catalogue.BACKGROUND_LIMIT, "m") == [batcher.stats.background_window]


async def test_without_goals_there_is_none_to_report() -> None:
    async with ContinuousBatcher(capacity=100, clock=Clock()) as batcher:
        told, report = reporting(batcher)
        report()
    assert told.of(catalogue.FIRST_TOKEN_GOAL, "m") == []


async def test_batches_are_reported_with_their_padding() -> None:
    async def process(batch: list[str]) -> list[str]:
        return batch

    async with DynamicBatcher(process, cost_estimator=len) as batcher:
        told, report = reporting(batcher)
        await asyncio.wait(await batcher.submit_batch(["a", "bbb"]))
        report()
        report()
        assert told.of(catalogue.BATCH_RECORDS, "m") == [2]
        assert told.of(catalogue.BATCH_COST, "m") == [4]
        assert told.total(catalogue.BATCHED_COST, "m") == 4
        assert told.total(catalogue.PADDED_COST, "m") == 6
        assert told.total(catalogue.RECORDS_ENDED, "m", "completed") == 2


async def test_what_is_refused_and_what_fails_is_told_apart() -> None:
    async def process(batch: list[str]) -> list[object]:
        return [ValueError(record) for record in batch]

    async with DynamicBatcher(process) as batcher:
        told, report = reporting(batcher)
        (ticket,) = await batcher.submit_batch(["x"])
        await asyncio.wait([ticket])
        assert ticket.exception()
        report()
        assert told.total(catalogue.RECORDS_ENDED, "m", "failed") == 1
        assert told.of(catalogue.RECORDS_ENDED, "m", "completed") == []


@given(st.lists(st.dictionaries(st.integers(0, 300).map(str), st.integers(1, 1000)), max_size=60))
def test_however_many_tenants_come_few_have_a_series(rounds: list[dict[str, int]]) -> None:
    tenants = Tenants(3)
    labels = set()
    for costs in rounds:
        tenants.round(costs)
        labels |= {tenants.label(tenant) for tenant in costs}
    assert len(labels - {OTHER}) <= 15


def test_names_run_out_however_often_the_top_changes() -> None:
    tenants = Tenants(3)
    for n in range(100):
        tenants.round({f"tenant-{n}": 2**n})
    names = {tenants.label(f"tenant-{n}") for n in range(100)}
    assert len(names - {OTHER}) == 15


def test_a_counter_is_told_what_has_grown() -> None:
    told = Instruments()
    meters = Meters([catalogue.BUSY], told.make)
    for total in (0, 1, 3, 3, 7):
        meters.count(catalogue.BUSY, total, "m")
    assert told.of(catalogue.BUSY, "m") == [1, 2, 4]


def test_who_uses_the_most_has_a_name_also_if_late() -> None:
    tenants = Tenants(2)
    tenants.round({"early": 5, "also": 5})
    for _ in range(10):
        tenants.round({f"small-{n}": 1 for n in range(50)} | {"late": 1_000})
    assert tenants.label("late") == "late"
    assert tenants.label("early") == "early"
    assert tenants.label("small-49") == OTHER
    assert Tenants(0).label("anybody") == OTHER
