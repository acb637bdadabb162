"""Profiles: presets that are arguments."""

import asyncio
import json
import random
from typing import Any

import pytest

from batcher import PROFILES, DynamicBatcher, TokenBatcher, profile
from tests.batcher.virtual import now, virtual


@virtual
@pytest.mark.parametrize("name", list(PROFILES))
async def test_every_profile_runs(name: str) -> None:
    rng = random.Random(1)

    async def process(batch: list[int]) -> list[int]:
        await asyncio.sleep(0.01)
        return batch

    for kind in (DynamicBatcher, TokenBatcher):
        batcher: DynamicBatcher[int, int] = kind(process, clock=now, **profile(name))
        async with batcher:
            futures = [await batcher.submit(i, estimated_cost=rng.randint(1, 500)) for i in range(300)]
            assert await asyncio.gather(*futures) == list(range(300))


def test_a_profile_can_be_changed() -> None:
    assert profile("real_time") == {"batch_timeout_s": 0.05, "prefetch_batches": 0}
    changed = profile("real_time", batch_timeout_s=0.1, max_batch_size=8)
    assert changed == {"batch_timeout_s": 0.1, "prefetch_batches": 0, "max_batch_size": 8}
    assert profile("real_time")["batch_timeout_s"] == 0.05


def test_profiles_are_plain_values_that_nobody_can_change() -> None:
    for name in PROFILES:
        assert json.loads(json.dumps(profile(name))) == profile(name)
    with pytest.raises(TypeError):
        PROFILES["real_time"]["batch_timeout_s"] = 1  # type: ignore[index]


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"profile must be one of 'uniform_length', .*, not 'fast'"):
        profile("fast")


@virtual
async def test_high_throughput_makes_batches_of_32_to_64() -> None:
    sizes: list[int] = []

    async def process(batch: list[Any]) -> list[Any]:
        sizes.append(len(batch))
        await asyncio.sleep(0.05)
        return batch

    batcher = DynamicBatcher(process, clock=now, **profile("high_throughput"))
    async with batcher:
        futures = []
        for i in range(640):
            futures.append(await batcher.submit(i))
            await asyncio.sleep(0.001)
        await asyncio.gather(*futures)
    assert all(32 <= size <= 64 for size in sizes[:-1])
