"""The benchmark of rows that share prefixes, with a small cache and few rows."""

from dataclasses import replace

import pytest

from tests.benchmarks.batches.order import Load, run_batch, run_dataset

LOAD = Load(rows=240, prefixes=24, in_flight=8, kv_tokens=36_000)
"""The prefixes have about 54,000 tokens."""


@pytest.mark.parametrize("replicas", [1, 2])
async def test_the_order_of_the_plan_finds_prefixes_in_the_cache(replicas: int) -> None:
    load = replace(LOAD, rows=LOAD.rows * replicas, prefixes=LOAD.prefixes * replicas)
    rate, cached = await run_batch(load, replicas, planned=False)
    planned_rate, planned_cached = await run_batch(load, replicas, planned=True)
    dataset_rate, _ = await run_dataset(load, replicas)
    assert planned_rate > 1.3 * rate
    assert dataset_rate > 1.3 * rate
    assert planned_cached > 1.4 * cached


async def test_rows_without_a_shared_prefix_lose_nothing() -> None:
    load = replace(LOAD, rows=60, prefixes=0)
    (rate, _), (planned_rate, _) = [await run_batch(load, 1, planned) for planned in (False, True)]
    assert planned_rate >= 0.99 * rate
