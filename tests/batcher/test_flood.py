"""Ten times what an engine can do, and what becomes of those who come back when they are told to."""

import asyncio
import math
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from batcher import ContinuousBatcher, Expired, QueueFull
from tests.batcher.stepping import Costs, StepEngine
from tests.batcher.virtual import VirtualLoop, now

COSTS = Costs()
PLACES, OUTPUT, QUEUE = 8, 128, 30
RATE = PLACES / (OUTPUT * (COSTS.step_s + PLACES * COSTS.sequence_s))
"""Requests per second that the engine can serve, near enough."""


@dataclass
class Found:
    """What came of a flood.

    Attributes:
        ends: Requests by how they ended, those that came back not counted.
        done: When each that was served ended.
        back: How many came back, by whether they were served.
        after: Seconds from request to answer of those sent five seconds after the flood, or later.
        late: Seconds by which a request with a limit on its wait started too late, or was told so.
    """

    ends: Counter[str] = field(default_factory=Counter)
    done: list[float] = field(default_factory=list)
    back: Counter[bool] = field(default_factory=Counter)
    after: list[float] = field(default_factory=list)
    late: float = 0.0
    deepest: int = 0
    probes: Counter[bool] = field(default_factory=Counter)


def flood(seconds: float, follow: float, background: int | None = None) -> Found:
    """Send ten times the rate for so many seconds; a share of those who are refused come back."""

    async def run() -> Found:
        found = Found()
        draw = random.Random(2)
        random.seed(2)
        async with ContinuousBatcher(
            capacity=16_000,
            max_running=PLACES,
            max_queue_size=QUEUE,
            priority_aging_s=None,
            background=background,
            clock=now,
        ) as batcher:
            engine = StepEngine(COSTS)

            async def ask(tenant: str, priority: int, limit: float | None = None) -> str | float:
                deadline = None if limit is None else now() + limit
                try:
                    async with batcher.slot_nowait(
                        priority=priority,
                        tenant=tenant,
                        deadline=deadline,
                        prompt_tokens=16,
                        max_tokens=OUTPUT,
                    ):
                        if deadline is not None:
                            found.late = max(found.late, now() - deadline)
                        await engine.add(16, OUTPUT, priority).done
                except QueueFull as error:
                    return error.retry_after_s
                except Expired:
                    if deadline is not None:
                        found.late = max(found.late, now() - deadline)
                    return "expired"
                found.done.append(now())
                return "served"

            async def one() -> None:
                tenant = "greedy" if draw.random() < 0.7 else draw.choice("abcdef")
                priority = draw.choice([0] * 6 + [1] * 3 + [-1])
                limit = 1.0 if draw.random() < 0.2 else None
                end = await ask(tenant, priority, limit)
                found.deepest = max(found.deepest, batcher.stats.queue_depth)
                if isinstance(end, str):
                    found.ends[end] += 1
                    return
                found.ends["refused"] += 1
                if draw.random() < follow:
                    await asyncio.sleep(max(1, math.ceil(end)))
                    found.back[await ask(tenant, priority) == "served"] += 1

            async def probe() -> None:
                at = now()
                end = await ask("probe", 0)
                if at >= seconds + 5:
                    found.probes[end == "served"] += 1
                    if end == "served":
                        found.after.append(now() - at)

            tasks = []
            while now() < seconds + 15:
                rate = 10 * RATE if now() < seconds else RATE / 4
                await asyncio.sleep(draw.expovariate(rate))
                tasks.append(asyncio.create_task(one() if now() < seconds else probe()))
            await asyncio.gather(*tasks)
            stats = batcher.stats
            assert (stats.running, stats.queue_depth) == (0, 0)
            engine.close()
        return found

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


@pytest.mark.parametrize(
    "background", [pytest.param(None, id="tiers"), pytest.param(1, id="background", marks=pytest.mark.long)]
)
def test_a_minute_of_ten_times_the_load(background: int | None) -> None:
    seconds = 60.0
    found = flood(seconds, 0.05, background)
    # The engine is never idle, and does nothing that comes too late.
    goodput = sum(5 <= at < seconds for at in found.done) / (seconds - 5)
    assert goodput >= 0.9 * RATE
    assert found.late <= 0.001
    assert found.deepest == QUEUE
    # Records that come back when told to are served, as a rule, also while it goes on.
    assert found.back[True] >= 0.9 * found.back.total() > 100
    # Five seconds later it is as if nothing had been.
    assert not found.probes[False]
    assert max(found.after) < 4 * OUTPUT / RATE / PLACES


def test_all_who_were_refused_come_back_after_a_short_burst() -> None:
    found = flood(3.0, 1.0)
    assert found.back.total() > 200
    assert found.back[True] >= 0.8 * found.back.total()
