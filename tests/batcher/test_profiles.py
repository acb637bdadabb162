"""Profiles: presets that are arguments."""

import asyncio
import random

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


def test_an_unknown_profile_is_refused() -> None:
    with pytest.raises(ValueError, match=r"profile must be one of 'uniform_length', .*, not 'fast'"):
        profile("fast")
