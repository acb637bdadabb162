"""Slots that start on a bound of their cost, which is corrected once they run."""

import asyncio

import hypothesis.strategies as st
import pytest
from hypothesis import given

from batcher import ContinuousBatcher, Expired, QueueFull
from tests.batcher.helpers import Holders, check_books, check_empty, continuous_batcher
from tests.batcher.virtual import blocked, virtual


@virtual
async def test_a_corrected_slot_makes_way_at_once() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        async with batcher.slot(prompt_tokens=80, max_tokens=20) as slot:
            await holders.enter("next", 70)
            assert holders.inside == []
            slot.correct(10, 20)
            assert (slot.cost, slot.prompt_tokens, slot.max_tokens) == (30, 10, 20)
            assert batcher.stats.running_cost == 100
            await blocked()
            assert holders.inside == ["next"]
        await holders.leave("next")
        check_empty(batcher)


@virtual
async def test_a_corrected_slot_may_grow_beyond_the_capacity() -> None:
    async with continuous_batcher(100) as batcher:
        holders = Holders(batcher)
        async with batcher.slot(50) as slot:
            slot.correct(120, 10)
            assert batcher.stats.running_cost == 130
            await holders.enter("waits", 1)
            assert holders.inside == []
        await blocked()
        assert holders.inside == ["waits"]
        await holders.leave("waits")
        check_empty(batcher)


@virtual
async def test_a_correction_keeps_what_the_policy_reserves() -> None:
    async with continuous_batcher(1_000, policy="max_utilization") as batcher:
        for _ in range(400):
            async with batcher.slot(prompt_tokens=1, max_tokens=100) as slot:
                slot.report(10)
        async with batcher.slot(prompt_tokens=300, max_tokens=100) as slot:
            slot.report(1)
            assert slot.cost == pytest.approx(310, abs=10)
            slot.correct(30, 50)
            assert slot.cost == pytest.approx(40, abs=10)
            slot.report(25)
            slot.correct(30, 50)
            assert slot.cost >= 55


@virtual
async def test_a_slot_is_corrected_while_it_runs() -> None:
    async with continuous_batcher(100) as batcher:
        slot = batcher.slot(10)
        with pytest.raises(RuntimeError, match="started"):
            slot.correct(1, 1)
        async with slot:
            with pytest.raises(ValueError, match="prompt_tokens"):
                slot.correct(-1, 1)
        slot.correct(1, 1)
        assert slot.cost == 10
        check_empty(batcher)


@virtual
async def test_a_loose_bound_costs_its_tenant_nothing() -> None:
    async with continuous_batcher(1_000, max_running=1) as batcher:
        served: list[str] = []

        async def work(tenant: str, bound: int) -> None:
            async with batcher.slot(bound, tenant=tenant) as slot:
                slot.correct(8, 2)
                served.append(tenant)
                await asyncio.sleep(1)

        async with asyncio.TaskGroup() as tasks:
            for _ in range(10):
                tasks.create_task(work("loose", 900))
                tasks.create_task(work("tight", 10))
        # The first one started while nothing waited.
        assert abs(served[:10].count("loose") - 5) <= 1


@virtual
async def test_estimates_are_not_inflated_by_bounds() -> None:
    async with continuous_batcher(100, max_queue_size=4) as batcher:
        assert batcher.stats.correction == 1.0
        for _ in range(40):
            async with batcher.slot(100) as slot:
                slot.correct(20, 5)
                await asyncio.sleep(4.0)
        assert batcher.stats.correction == pytest.approx(0.25)
        holders = Holders(batcher)
        async with batcher.slot(100):
            for name in "abcd":
                await holders.enter(name, 100)
            with pytest.raises(QueueFull) as refused:
                batcher.slot_nowait(100)
            # Four of 25 are served at the time, each for 4 s; those four take 4 s, not 16.
            assert refused.value.retry_after_s < 12.0
            for name in "abcd":
                await holders.cancel(name)
            await holders.enter("in time", 100, timeout=20.0)
            await holders.enter("too late", 100, timeout=0.5)
            assert isinstance(holders.tasks["too late"].exception(), Expired)
            assert not holders.tasks["in time"].done()
        await holders.leave("in time")


@given(
    st.lists(st.tuples(st.integers(1, 60), st.integers(0, 60), st.integers(0, 10)), min_size=1, max_size=20)
)
def test_the_books_agree_whatever_is_corrected(records: list[tuple[int, int, int]]) -> None:
    async def run() -> None:
        async with ContinuousBatcher(capacity=100) as batcher:

            async def work(bound: int, prompt: int, output: int) -> None:
                async with batcher.slot(bound) as slot:
                    slot.correct(prompt, output)
                    slot.report(output)
                    await asyncio.sleep(0)
                    assert batcher.stats.running_cost >= slot.cost == prompt + output
                    check_books(batcher)

            async with asyncio.TaskGroup() as tasks:
                for record in records:
                    tasks.create_task(work(*record))
            check_empty(batcher)

    asyncio.run(run())


@virtual
async def test_a_caller_with_a_list_has_one_record_outside_at_a_time() -> None:
    async with continuous_batcher(10, max_queue_size=2) as batcher:
        most = 0

        async def run() -> None:
            nonlocal most
            slots = []
            for _ in range(20):
                slots.append(await batcher.slot(10).enter())
                most = max(most, batcher.stats.outside)
                tasks.create_task(use(slots[-1]))

        async def use(slot: object) -> None:
            async with slot:  # type: ignore[attr-defined]
                most_now.append(batcher.stats.outside)
                await asyncio.sleep(1)

        most_now: list[int] = []
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(run())
            tasks.create_task(run())
        assert max(most_now) == 2
        assert len(most_now) == 40
        check_empty(batcher)


@virtual
async def test_a_slot_that_started_before_it_was_used() -> None:
    async with continuous_batcher(10) as batcher:
        first, second = batcher.slot_nowait(10), batcher.slot_nowait(10)
        assert (first.running, second.waiting) == (True, True)
        async with first:
            pass
        assert second.running
        with pytest.raises(RuntimeError, match="once"):
            await second.enter()
        second.release(ValueError())
        with pytest.raises(RuntimeError, match="given back"):
            await second.__aenter__()
        stats = batcher.stats
        assert (stats.total_completed, stats.total_failed) == (1, 1)
        check_empty(batcher)


@pytest.mark.parametrize(
    ("error", "ended"),
    [
        (None, "total_completed"),
        (asyncio.CancelledError(), "total_cancelled"),
        (GeneratorExit(), "total_cancelled"),
        (OSError(), "total_failed"),
    ],
)
@virtual
async def test_who_releases_a_slot_says_how_it_ended(error: BaseException | None, ended: str) -> None:
    async with continuous_batcher(10) as batcher:
        slot = batcher.slot_nowait(10)
        slot.release(error)
        slot.release(None)
        assert getattr(batcher.stats, ended) == 1
        check_empty(batcher)
