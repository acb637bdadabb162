"""Background records give way in the engine, so the foreground starts as if none ran."""

import asyncio
import itertools
import random
from collections.abc import Iterator

import pytest

from batcher import ContinuousBatcher, QueueFull, Slot
from tests.batcher.helpers import Holders, check_empty, continuous_batcher
from tests.batcher.virtual import blocked, now, virtual


def batcher_of(capacity: int = 100, **settings: object) -> ContinuousBatcher:
    settings = {"background": 1, "priority_aging_s": None, "max_queue_size": 100} | settings
    return continuous_batcher(capacity, **settings)


async def fill(holders: Holders, count: int, cost: int = 10, *, wait: bool = False) -> None:
    """Let some records of the background come."""
    for number in range(count):
        await holders.enter(f"flex {number}", cost, priority=1, wait=wait)


def flex(holders: Holders) -> int:
    return sum(name.startswith("flex") for name in holders.inside)


@virtual
@pytest.mark.parametrize("settings", [{}, {"capacity": 1_000, "max_running": 10}], ids=["cost", "places"])
async def test_the_foreground_starts_as_if_no_background_ran(settings: dict[str, int]) -> None:
    async with batcher_of(**settings) as batcher:
        holders = Holders(batcher)
        await fill(holders, 15)
        assert flex(holders) == 10
        for number in range(11):
            await holders.enter(f"chat {number}")
        # It takes all the places or the capacity once more, and then waits for itself.
        assert len(holders.inside) == 20
        assert "chat 9" in holders.inside
        stats = batcher.stats
        assert (stats.running, stats.running_cost) == (20, 200)
        assert (stats.background_running, stats.background_cost) == (10, 100)
        await holders.leave("chat 0")
        assert "chat 10" in holders.inside
        # The background starts only when all that runs leaves it space.
        await holders.leave(*(f"chat {number}" for number in range(11)))
        assert flex(holders) == 10
        await holders.leave("flex 0")
        assert flex(holders) == 10
        await holders.leave_all()
        check_empty(batcher)


@virtual
async def test_the_foreground_passes_a_background_that_waits_in_the_order_of_its_tiers() -> None:
    async with batcher_of() as batcher:
        holders = Holders(batcher)
        await fill(holders, 12)
        await holders.enter("urgent", 90, priority=-1)
        await holders.enter("large", 20)
        await holders.enter("small")
        # A small one doesn't pass a large one of the foreground.
        assert holders.started[10:] == ["urgent"]
        assert batcher.estimate_wait(10, priority=-1) == 0.0
        await holders.leave("urgent")
        assert holders.started[10:] == ["urgent", "large", "small"]
        await holders.leave_all()


@virtual
async def test_without_a_background_all_tiers_share_the_window() -> None:
    async with batcher_of(background=None) as batcher:
        holders = Holders(batcher)
        await fill(holders, 10)
        await holders.enter("chat")
        assert holders.started == [f"flex {number}" for number in range(10)]
        assert batcher.stats.background_running == 0
        await holders.leave("flex 0")
        assert "chat" in holders.inside
        await holders.leave_all()


@virtual
async def test_a_record_larger_than_the_capacity_runs_alone_among_those_that_give_it_no_way() -> None:
    async with batcher_of(oversize="alone") as batcher:
        holders = Holders(batcher)
        await fill(holders, 2, cost=200)
        assert holders.inside == ["flex 0"]
        await holders.enter("Chat", 200)
        await holders.enter("chat")
        assert holders.inside == ["flex 0", "Chat"]
        await holders.leave("Chat")
        assert holders.inside == ["flex 0", "chat"]
        await holders.leave("flex 0")
        assert holders.inside == ["chat"]
        await holders.leave("chat")
        assert holders.inside == ["flex 1"]
        await holders.leave("flex 1")


@virtual
async def test_slots_that_are_not_corrected_yet_hold_up_the_background_alone() -> None:
    async with batcher_of(max_starting=2) as batcher:
        slots = [batcher.slot_nowait(1, priority=priority) for priority in (1, 1, 1, 0, 0, 0)]
        assert [slot.running for slot in slots] == [True, True, False, True, True, True]
        slots[3].correct(1, 0)
        assert not slots[2].running
        slots[0].correct(1, 0)
        assert all(slot.running for slot in slots)
        for slot in slots:
            slot.release()


# Starvation


@virtual
async def test_nobody_passes_a_background_record_that_has_waited_too_long() -> None:
    async with batcher_of(priority_aging_s=5.0) as batcher:
        holders = Holders(batcher)
        await holders.enter("chat", 95)
        await asyncio.sleep(20)
        await fill(holders, 1)
        # The time counts from the moment at which it began to wait.
        await asyncio.sleep(4.9)
        await holders.enter("in time", 5)
        assert holders.started == ["chat", "in time"]
        await holders.leave("in time")
        await asyncio.sleep(0.2)
        # It counts as foreground now, which has no room for it.
        await holders.enter("late", 5)
        assert batcher.stats.queue_depth == 2
        await holders.leave("chat")
        assert holders.started[2:] == ["flex 0", "late"]
        await holders.leave_all()


@virtual
async def test_a_promoted_record_starts_without_anything_else_happening_and_counts_as_foreground() -> None:
    async with batcher_of(priority_aging_s=5.0) as batcher:
        holders = Holders(batcher)
        await fill(holders, 10)
        await holders.enter("chat", 40)
        promoted = [batcher.slot_nowait(30, priority=1) for _ in range(3)]
        for count, seconds in ((0, 4.9), (1, 0.2), (1, 4.7), (2, 0.2)):
            await asyncio.sleep(seconds)
            assert [slot.running for slot in promoted].count(True) == count
            assert [slot.promoted for slot in promoted].count(True) == count
        stats = batcher.stats
        assert (stats.background_running, stats.total_promoted) == (10, 2)
        # Chat and two records have all the capacity.
        await holders.enter("late", 1)
        assert "late" not in holders.inside
        promoted[0].release()
        assert not promoted[2].running
        for slot in promoted:
            slot.release()
        await holders.leave_all()
        check_empty(batcher)


@virtual
async def test_a_background_that_waits_for_itself_alone_is_not_promoted() -> None:
    async with batcher_of(priority_aging_s=1.0) as batcher:
        holders = Holders(batcher)
        await fill(holders, 11)
        await asyncio.sleep(60)
        assert (flex(holders), batcher.stats.total_promoted) == (10, 0)
        # Where it fits beside all that runs it is not promoted either.
        await holders.leave("flex 0")
        assert (flex(holders), batcher.stats.total_promoted) == (10, 0)
        await holders.leave_all()


@virtual
async def test_a_record_larger_than_the_capacity_does_not_wait_for_ever_beside_live_traffic() -> None:
    async with batcher_of(priority_aging_s=1.0, oversize="alone") as batcher:
        holders = Holders(batcher)
        await holders.enter("chat 0")
        await fill(holders, 1, cost=200)
        for number in range(1, 4):
            await holders.enter(f"chat {number}")
            await asyncio.sleep(0.6)
            await holders.leave(f"chat {number - 1}")
        await holders.leave("chat 3")
        assert "flex 0" in holders.started
        assert holders.started.index("flex 0") <= 3
        await holders.leave_all()


# The queue, and estimates


@virtual
async def test_the_background_finds_the_queue_full_before_the_foreground_does() -> None:
    async with batcher_of(max_running=1, max_queue_size=10) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs")
        await fill(holders, 10)
        assert batcher.stats.queue_depth == 9
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1, priority=1)
        await holders.enter("chat")
        assert batcher.stats.queue_depth == 10
        with pytest.raises(QueueFull):
            batcher.slot_nowait(1)
        await holders.leave_all()


@virtual
async def test_the_foreground_does_not_stand_behind_a_background_that_waits_for_space() -> None:
    async with batcher_of(max_running=1, max_queue_size=10) as batcher:
        holders = Holders(batcher)
        await fill(holders, 20, wait=True)
        assert batcher.stats.outside == 10
        await holders.enter("chat")
        assert holders.inside == ["flex 0", "chat"]
        await holders.leave_all()
        check_empty(batcher)


@virtual
async def test_each_kind_is_told_the_wait_of_its_own() -> None:
    async with batcher_of(max_running=8) as batcher:
        for priority, seconds in ((0, 1.0), (1, 4.0)):
            for _ in range(20):
                async with batcher.slot(1, priority=priority):
                    await asyncio.sleep(seconds)
        holders = Holders(batcher)
        await fill(holders, 12, cost=1)
        assert batcher.estimate_wait(1) == 0.0
        # Eight run for 4 s each; four wait, and one more.
        assert batcher.estimate_wait(1, priority=1) == pytest.approx(5 * 4.0 / 8)
        for number in range(10):
            await holders.enter(f"chat {number}", 1)
        # Eight run for a second each, two wait, and one more.
        assert batcher.estimate_wait(1) == pytest.approx(3 * 1.0 / 8)
        batcher.pause(3.0)
        await holders.leave(*holders.inside)
        assert batcher.estimate_wait(1, priority=-1) == pytest.approx(3.0)
        batcher.resume()
        await holders.leave_all()


# At random


class Schedule:
    """Live requests and rows that come at random, and what is true of each start."""

    def __init__(self, seed: int, aging_s: float | None) -> None:
        self.draw = random.Random(seed)
        self.aging_s = aging_s
        self.capacity, self.places = self.draw.choice([(100, 8), (40, 20)])
        self.batcher = batcher_of(self.capacity, max_running=self.places, priority_aging_s=aging_s)
        self.runs: list[Slot] = []
        self.waiting: list[Slot] = []
        self.background_starts: list[float] = []

    def sums(self, slots: Iterator[Slot]) -> tuple[int, int]:
        pairs = [(slot.records, slot.cost) for slot in slots]
        return sum(records for records, _ in pairs), sum(cost for _, cost in pairs)

    def fits(self, slot: Slot, beside: Iterator[Slot]) -> bool:
        records, cost = self.sums(beside)
        return records + slot.records <= self.places and cost + slot.cost <= self.capacity

    def foreground(self) -> Iterator[Slot]:
        return (slot for slot in self.runs if slot.priority < 1 or slot.promoted)

    async def request(self, priority: int) -> None:
        # Live requests are alike, so that none waits behind a larger one.
        cost, records = (self.draw.randint(1, 25), self.draw.choice([1, 1, 2])) if priority >= 1 else (5, 1)
        slot = self.batcher.slot(cost, priority, records=records, tenant=self.draw.choice("ab"))
        self.waiting.append(slot)
        async with slot:
            self.waiting.remove(slot)
            if priority >= 1:
                self.background_starts.append(now())
                assert slot.promoted or self.fits(slot, iter(self.runs))
            assert self.fits(slot, self.foreground())
            self.runs.append(slot)
            await asyncio.sleep(self.draw.expovariate(0.5))
            self.runs.remove(slot)

    def check(self) -> None:
        """Check that no foreground record waits for which the foreground leaves room."""
        for slot in self.waiting:
            assert slot.priority >= 1 or not self.fits(slot, self.foreground())

    async def run(self, live_per_s: float, rows_per_s: float, seconds: float) -> None:
        async with self.batcher, asyncio.TaskGroup() as group:
            while now() < seconds:
                await asyncio.sleep(self.draw.expovariate(live_per_s + rows_per_s))
                live = self.draw.random() < live_per_s / (live_per_s + rows_per_s)
                group.create_task(self.request(self.draw.choice([-1, 0]) if live else 1))
                await blocked()
                if self.aging_s is None:
                    self.check()


@pytest.mark.parametrize("seed", range(20))
@virtual
async def test_a_foreground_record_never_waits_while_the_foreground_alone_leaves_room(seed: int) -> None:
    schedule = Schedule(seed, aging_s=None)
    await schedule.run(live_per_s=schedule.draw.choice([0.5, 2, 4]), rows_per_s=4, seconds=40)


@pytest.mark.parametrize("seed", range(10))
@virtual
async def test_a_background_that_waits_starts_a_record_per_ageing_time_under_endless_load(seed: int) -> None:
    schedule = Schedule(seed, aging_s=5.0)
    await schedule.run(live_per_s=20, rows_per_s=1, seconds=120)
    starts = [0.0, *(at for at in schedule.background_starts if at < 120)]
    assert len(starts) >= 20
    # The record waits for its room, of the records that run for two seconds.
    assert max(after - before for before, after in itertools.pairwise(starts)) < 5.0 + 6.0
