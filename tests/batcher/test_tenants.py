"""What a tenant that floods the batcher does to the others, in front of an engine that works in steps."""

import asyncio
import random
from collections import Counter
from dataclasses import dataclass, field

import pytest

from batcher import ContinuousBatcher, QueueFull
from batcher.stats import percentiles
from tests.batcher.helpers import Holders
from tests.batcher.stepping import Costs, StepEngine
from tests.batcher.virtual import VirtualLoop, blocked, now, virtual

PLACES = 32
LIGHT_RATE = 2.0
SECONDS = 60.0


@dataclass
class Seen:
    """What came of the light tenant's requests: seconds to the first token and to the end."""

    ttft: list[float] = field(default_factory=list)
    took: list[float] = field(default_factory=list)
    refused: Counter[str] = field(default_factory=Counter)

    def p99(self) -> tuple[float, float]:
        return percentiles(self.ttft, [0.99])[0], percentiles(self.took, [0.99])[0]


def beside(times: float, *, tenants: bool = True) -> Seen:
    """Run a light tenant beside one that sends so many times as much; 0: it just keeps the engine full."""

    async def run() -> Seen:
        seen = Seen()
        draw = random.Random(3)
        async with ContinuousBatcher(
            capacity=16_000, max_running=PLACES, max_queue_size=500, clock=now
        ) as batcher:
            engine = StepEngine(Costs())

            async def ask(name: str) -> None:
                prompt, output = draw.randint(32, 128), draw.randint(16, 128)
                at = now()
                try:
                    async with batcher.slot_nowait(
                        tenant=name if tenants else "all", prompt_tokens=prompt, max_tokens=output
                    ):
                        sequence = engine.add(prompt, output, 0)
                        await sequence.first
                        first = now()
                        await sequence.done
                except QueueFull:
                    seen.refused[name] += 1
                    return
                if name == "light":
                    seen.ttft.append(first - at)
                    seen.took.append(now() - at)

            async def open_loop(name: str, rate: float) -> None:
                running = set()
                while now() < SECONDS:
                    await asyncio.sleep(draw.expovariate(rate))
                    task = asyncio.create_task(ask(name))
                    running.add(task)
                    task.add_done_callback(running.discard)
                await asyncio.gather(*running)

            async def closed_loop() -> None:
                while now() < SECONDS:
                    await ask("heavy")

            heavy = [open_loop("heavy", times * LIGHT_RATE)] if times else []
            full = [] if times else [closed_loop() for _ in range(PLACES)]
            await asyncio.gather(open_loop("light", LIGHT_RATE), *heavy, *full)
            engine.close()
        return seen

    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(run())


def test_fifty_times_the_requests_move_the_other_s_p99_by_less_than_a_quarter() -> None:
    ttft, took = beside(0).p99()
    flooded = beside(50)
    assert flooded.refused["heavy"] > 1_000, "the flood must be more than the engine can do"
    assert flooded.refused["light"] == 0
    after_ttft, after_took = flooded.p99()
    print(f"TTFT {ttft * 1e3:.0f} -> {after_ttft * 1e3:.0f} ms, in all {took:.2f} -> {after_took:.2f} s")
    assert after_ttft <= 1.25 * ttft
    assert after_took <= 1.25 * took


def test_without_tenants_the_light_one_would_wait_and_be_refused_with_the_other() -> None:
    flooded = beside(50, tenants=False)
    assert flooded.refused["light"] > 10
    assert flooded.p99()[0] > 10 * beside(50).p99()[0]


@virtual
async def test_one_tenant_may_fill_the_whole_queue_while_it_is_the_only_one() -> None:
    async with ContinuousBatcher(capacity=1, max_queue_size=20, clock=now) as batcher:
        holders = Holders(batcher)
        for number in range(21):
            await holders.enter(f"heavy {number}", 1, tenant="heavy")
        assert batcher.stats.queue_depth == 20
        for tenant in ("heavy", "light"):
            with pytest.raises(QueueFull, match="max_queue_size=20"):
                batcher.slot_nowait(1, tenant=tenant)
        # The light one was seen: the next place is for it, not for the one that has more than its share.
        await holders.leave("heavy 0")
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1, tenant="heavy")
        await holders.enter("light", 1, tenant="light")
        assert batcher.stats.queue_depth == 20
        await batcher.stop(drain=False, timeout=0)


@virtual
async def test_beyond_four_fifths_of_the_queue_a_tenant_has_its_share_by_weight() -> None:
    async with ContinuousBatcher(
        capacity=1, max_queue_size=40, tenant_weights={"gold": 9.0}, clock=now
    ) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 1, tenant="gold")
        await holders.enter("gold", 1, tenant="gold")
        # Four fifths are open to all; of the rest tin has no share, since a tenth of the whole is 4.
        for tenant, most in (("tin", 31), ("gold", 8)):
            for number in range(50):
                await holders.enter(f"{tenant} {number}", 1, tenant=tenant)
            tasks = [task for name, task in holders.tasks.items() if name.startswith(f"{tenant} ")]
            assert sum(not task.done() for task in tasks) == most
            assert all(isinstance(task.exception(), QueueFull) for task in tasks if task.done())
        assert batcher.stats.queue_depth == 40
        await batcher.stop(drain=False, timeout=0)


@virtual
async def test_the_bound_holds_whatever_tenants_are_invented() -> None:
    async with ContinuousBatcher(capacity=1, max_queue_size=100, max_queue_cost=150, clock=now) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 1)
        for number in range(1_000):
            await holders.enter(f"holder {number}", 1, tenant=f"t{number}")
        tasks = [task for name, task in holders.tasks.items() if name != "runs"]
        assert batcher.stats.queue_depth == 100
        assert sum(isinstance(task.exception(), QueueFull) for task in tasks if task.done()) == 900
        await batcher.stop(drain=False, timeout=0)
        assert all(task.exception() is not None for task in tasks)


@virtual
async def test_a_list_is_not_stuck_behind_a_longer_one_of_another_tenant() -> None:
    async with ContinuousBatcher(capacity=4, max_queue_size=100, clock=now) as batcher:
        order: list[str] = []

        async def one(tenant: str) -> None:
            async with batcher.slot(1, tenant=tenant):
                order.append(tenant)
                await asyncio.sleep(1.0)

        tasks = [asyncio.create_task(one("heavy")) for _ in range(1_000)]
        await blocked()
        assert batcher.stats.outside == 1_000 - 104
        tasks += [asyncio.create_task(one("light")) for _ in range(20)]
        await asyncio.gather(*tasks)
    # Each has every other turn.
    assert order[:60].count("light") == 20


@virtual
async def test_weights_can_be_changed_while_records_wait() -> None:
    async with ContinuousBatcher(
        capacity=1, max_queue_size=1_000, tenant_weights={"gold": 3.0}, clock=now
    ) as batcher:
        order: list[str] = []

        async def one(tenant: str) -> None:
            async with batcher.slot(1, tenant=tenant):
                order.append(tenant)
                await asyncio.sleep(1.0)

        tasks = [asyncio.create_task(one(tenant)) for _ in range(200) for tenant in ("gold", "tin")]
        await asyncio.sleep(100)
        assert 73 <= order.count("gold") <= 77
        batcher.set_tenant_weights({"tin": 4.0})
        del order[:]
        await asyncio.sleep(100)
        assert 78 <= order.count("tin") <= 82
        with pytest.raises(ValueError, match=r"tenant_weights\['tin'\] must be a finite number >= 0.000001"):
            batcher.set_tenant_weights({"tin": 0.0})
        for task in tasks:
            task.cancel()
        await blocked()
