"""Lanes: a record starts with all its needs, or is passed by and keeps its place."""

import asyncio
from collections import Counter
from collections.abc import Coroutine
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batcher import Aborted, Closed, ContinuousBatcher, Expired, QueueFull, Slot
from tests.batcher.helpers import Holders, check_books, check_empty, continuous_batcher
from tests.batcher.virtual import VirtualLoop, blocked, now, virtual
from tests.fakes.clock import Clock


class Places:
    """Lanes with so many places for each need, and what they were told."""

    def __init__(self, **places: int) -> None:
        self.places = places
        self.taken: Counter[str] = Counter()
        self.wishes: set[str] = set()
        self.refused: set[str] = set()  # needs that are not to be asked for again before a reopening
        self.calls = 0

    def open(self, need: str, places: int = 1) -> None:
        """Change the places of a need, before the batcher is told to reopen."""
        self.places[need] = places
        self.refused.clear()

    def free(self, need: str) -> bool:
        return self.taken[need] < self.places[need]

    def take(self, need: str) -> bool:
        self.calls += 1
        assert need not in self.refused
        if not self.free(need):
            self.wishes.add(need)
            self.refused.add(need)
            return False
        self.taken[need] += 1
        self.wishes.discard(need)
        return True

    def give(self, need: str) -> bool:
        assert self.taken[need] > 0
        self.taken[need] -= 1
        helps = need in self.refused
        if helps:
            self.refused.clear()
        return helps

    def unwanted(self, need: str) -> bool:
        assert need in self.wishes
        self.wishes.remove(need)
        self.refused.discard(need)
        return False


class Hand:
    """Lanes with one place for all needs, which a wish reserves."""

    def __init__(self) -> None:
        self.holder = ""
        self.reserved = ""

    def take(self, need: str) -> bool:
        if self.holder or self.reserved not in ("", need):
            self.reserved = self.reserved or need
            return False
        self.holder, self.reserved = need, ""
        return True

    def give(self, need: str) -> bool:
        self.holder = ""
        return True

    def unwanted(self, need: str) -> bool:
        ended = self.reserved == need
        self.reserved = "" if ended else self.reserved
        return ended and not self.holder


@virtual
async def test_a_record_whose_need_is_refused_is_passed_by_also_by_its_own_tenant() -> None:
    lanes = Places(a=1)
    async with continuous_batcher(40, lanes=lanes) as batcher:
        holders = Holders(batcher)
        await holders.enter("first", needs=("a",))
        await holders.enter("second", needs=("a",))
        await holders.enter("third", needs=("a",))
        await holders.enter("base")
        await holders.enter("other", tenant="other")
        assert holders.inside == ["first", "base", "other"]
        assert (batcher.stats.queue_depth, batcher.stats.queue_cost) == (2, 20)
        assert batcher.load.waiting == 2
        await holders.leave("first")
        assert holders.inside == ["base", "other", "second"]
        await holders.leave("second", "third", "base", "other")
        assert holders.order == "firstbaseothersecondthird"
        check_empty(batcher)
    assert not +lanes.taken


@virtual
async def test_a_record_that_was_passed_by_is_before_those_that_came_after_it() -> None:
    lanes = Places(a=0)
    async with continuous_batcher(10, lanes=lanes) as batcher:
        holders = Holders(batcher)
        await holders.enter("a", needs=("a",))
        await holders.enter_all("bcd")
        assert holders.inside == ["b"]
        lanes.open("a")
        batcher.reopen()
        await holders.leave(*"bacd")
        assert holders.order == "bacd"


@virtual
async def test_a_head_that_does_not_fit_blocks_those_behind_it() -> None:
    async with continuous_batcher(10, lanes=Places(a=1)) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 5)
        await holders.enter("large", 6, needs=("a",))
        await holders.enter("small", 1)
        assert holders.inside == ["runs"]
        await holders.leave("runs", "large", "small")
        assert holders.started == ["runs", "large", "small"]


@virtual
async def test_a_slot_takes_all_its_needs_or_none() -> None:
    lanes = Places(a=1, b=1)
    async with continuous_batcher(40, lanes=lanes) as batcher:
        holders = Holders(batcher)
        await holders.enter("b", needs=("b",))
        await holders.enter("both", needs=("a", "b", "a"))
        assert lanes.taken == Counter(b=1)
        await holders.enter("a", needs=("a",))
        assert holders.inside == ["b", "a"]
        await holders.leave("a")
        assert holders.inside == ["b"]
        await holders.leave("b")
        assert holders.inside == ["both"]
        assert lanes.taken == Counter(a=1, b=1)
        await holders.leave("both")
    assert not +lanes.taken


@virtual
async def test_a_wish_ends_also_with_a_need_that_is_given_back_for_another() -> None:
    lanes = Places(a=0, b=0)
    async with continuous_batcher(40, lanes=lanes) as batcher:
        holders = Holders(batcher)
        await holders.enter("both", needs=("a", "b"))
        assert lanes.wishes == {"a"}
        lanes.open("a")
        batcher.reopen()
        assert lanes.wishes == {"b"}
        await holders.cancel("both")
        assert lanes.wishes == set()


@virtual
async def test_a_need_can_be_given_back_while_the_slot_runs() -> None:
    lanes = Places(a=1)
    async with continuous_batcher(40, lanes=lanes) as batcher:
        holders = Holders(batcher)
        async with batcher.slot(10, needs=("a",)) as slot:
            await holders.enter("next", needs=("a",))
            assert holders.inside == []
            slot.give("a")
            slot.give("a")
            await blocked()
            assert holders.inside == ["next"]
            assert lanes.taken == Counter(a=1)
            with pytest.raises(ValueError, match="'b'"):
                slot.give("b")
        slot.give("a")
        assert lanes.taken == Counter(a=1)
        await holders.leave("next")
    assert not +lanes.taken


@pytest.mark.parametrize("how", ["cancelled", "expired", "stopped", "refused"])
@virtual
async def test_a_wish_ends_when_the_last_record_that_waits_for_it_has_gone(how: str) -> None:
    lanes = Places(a=0)
    batcher = continuous_batcher(40, lanes=lanes, max_queue_size=2)
    async with batcher:
        holders = Holders(batcher)
        await holders.enter("one", needs=("a",), timeout=5.0 if how == "expired" else None)
        await holders.enter("two", needs=("a",))
        assert lanes.wishes == {"a"}
        await holders.cancel("two")
        assert lanes.wishes == {"a"}
        match how:
            case "cancelled":
                await holders.cancel("one")
            case "expired":
                await asyncio.sleep(6)
                assert isinstance(holders.tasks["one"].exception(), Expired)
            case "stopped":
                await batcher.stop(drain=False)
                assert isinstance(holders.tasks["one"].exception(), Closed)
            case "refused":
                await holders.cancel("one")
                lanes.places["b"] = 0
                await holders.enter("fills", needs=("a",))
                await holders.enter("fills too", needs=("a",))
                with pytest.raises(QueueFull):
                    batcher.slot_nowait(10, needs=("b",))
                assert lanes.wishes == {"a"}
                await holders.cancel("fills")
                await holders.cancel("fills too")
        assert lanes.wishes == set()
    check_books(batcher)


@virtual
async def test_the_end_of_a_wish_may_let_others_start() -> None:
    async with continuous_batcher(40, lanes=Hand()) as batcher:
        holders = Holders(batcher)
        await holders.enter("a", needs=("a",))
        await holders.enter("b", needs=("b",))
        await holders.enter("c", needs=("c",))
        batcher.pause()
        await holders.leave("a")
        await holders.cancel("b")
        batcher.resume()
        await blocked()
        assert holders.inside == ["c"]
        await holders.leave("c")


@virtual
async def test_a_stop_waits_for_records_that_are_passed_by() -> None:
    lanes = Places(a=0)
    batcher = continuous_batcher(40, lanes=lanes)
    await batcher.start()
    holders = Holders(batcher)
    await holders.enter("a", needs=("a",))
    stop = asyncio.create_task(batcher.stop())
    await blocked()
    assert not stop.done()
    lanes.open("a")
    batcher.reopen()
    await holders.leave("a")
    await stop
    check_empty(batcher)


@virtual
async def test_a_newcomer_has_no_credit_over_tenants_that_are_passed_by() -> None:
    lanes = Places(a=0)
    async with continuous_batcher(10, lanes=lanes) as batcher:
        holders = Holders(batcher)
        await holders.enter("blocks")
        await holders.enter("passed by", needs=("a",), tenant="old")
        old = [f"old {number}" for number in range(4)]
        for name in old:
            await holders.enter(name, tenant="old")
        await holders.leave("blocks", *old)
        await holders.enter("blocks again")
        for name in ("new 0", "new 1"):
            await holders.enter(name, tenant="new")
        lanes.open("a")
        batcher.reopen()
        await holders.leave_all()
        assert holders.started[-3:] == ["new 0", "passed by", "new 1"]


@virtual
async def test_records_with_needs_and_without_start_as_they_came() -> None:
    async with continuous_batcher(10, lanes=Places(a=1, b=1)) as batcher:
        holders = Holders(batcher)
        needs = [(), ("a",), (), ("b",), ("a",), (), ("a", "b"), ()]
        for number, each in enumerate(needs):
            await holders.enter(str(number), needs=each)
        await holders.leave_all()
        assert holders.order == "01234567"


@virtual
async def test_a_wish_ends_also_when_its_record_expires_in_the_middle_of_a_decision() -> None:
    clock = Clock()

    class Slow(Places):
        def take(self, need: str) -> bool:
            clock.now += 10.0 if need == "b" else 0.0
            return super().take(need)

    lanes = Slow(a=0, b=1)
    async with ContinuousBatcher(capacity=10, lanes=lanes, clock=clock) as batcher:
        late = batcher.slot_nowait(1, needs=("a",), timeout=5.0)
        assert lanes.wishes == {"a"}
        async with batcher.slot(1, needs=("b",)):
            assert isinstance(late.exception(), Expired)
            assert lanes.wishes == set()


@virtual
async def test_thousands_that_are_passed_by_cost_a_decision_nothing() -> None:
    lanes = Places(a=0)
    async with continuous_batcher(10, lanes=lanes, max_queue_size=100_000) as batcher:
        slots = [batcher.slot_nowait(1, tenant=f"t{n % 10}", needs=("a",)) for n in range(5_000)]
        assert lanes.calls == 1
        for _ in range(1_000):
            async with batcher.slot(10):
                pass
        assert lanes.calls == 1
        lanes.open("a")
        batcher.reopen()
        assert [slot.running for slot in slots].index(True) == 0
        assert sum(slot.running for slot in slots) == 1
        for slot in slots:
            slot.release()
    check_books(batcher)


@virtual
async def test_needs_are_for_a_batcher_with_lanes() -> None:
    with pytest.raises(ValueError, match="lanes"):
        continuous_batcher(10).slot(1, needs=("a",))


NEEDS: list[tuple[str, ...]] = [(), (), ("a",), ("b",), ("a", "b")]
PLACE = st.integers(0, 10**6)


class LanesMachine(RuleBasedStateMachine):
    """Records with needs or without: start, leave, cancel, expire, give back early, and changes of lanes."""

    CAPACITY = 12
    QUEUE = 8

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.lanes = Places(a=1, b=1)
        self.batcher = ContinuousBatcher(
            capacity=self.CAPACITY,
            lanes=self.lanes,
            max_queue_size=self.QUEUE,
            priority_aging_s=3.0,
            clock=self.loop.time,
        )
        self.slots: list[Slot] = []  # all that were let in, by arrival
        self.started: list[Slot] = []
        self.inside: dict[Slot, asyncio.Future[None]] = {}
        self.tasks: dict[Slot, asyncio.Task[None]] = {}
        self.run(self.batcher.start())

    def run(self, work: Coroutine[Any, Any, None]) -> None:
        async def step() -> None:
            await work
            await blocked()

        self.loop.run_until_complete(step())

    @rule(
        cost=st.integers(1, 12),
        priority=st.integers(0, 1),
        tenant=st.sampled_from("xy"),
        needs=st.sampled_from(NEEDS),
        timeout=st.sampled_from([None, None, 1.0, 5.0]),
        wait=st.booleans(),
    )
    def enter(
        self, cost: int, priority: int, tenant: str, needs: tuple[str, ...], timeout: float | None, wait: bool
    ) -> None:
        async def hold(slot: Slot) -> None:
            async with slot:
                self.started.append(slot)
                self.inside[slot] = self.loop.create_future()
                try:
                    await self.inside[slot]
                finally:
                    del self.inside[slot]

        async def work() -> None:
            batcher = self.batcher
            make_slot = batcher.slot if wait else batcher.slot_nowait
            try:
                slot = make_slot(
                    cost, priority=priority, tenant=tenant, needs=needs, deadline=timeout and now() + timeout
                )
            except (QueueFull, Expired):
                return
            self.slots.append(slot)
            self.tasks[slot] = asyncio.create_task(hold(slot))

        self.run(work())

    @precondition(lambda self: self.inside)
    @rule(place=PLACE, fails=st.booleans())
    def leave(self, place: int, fails: bool) -> None:
        async def work() -> None:
            outcome = list(self.inside.values())[place % len(self.inside)]
            if fails:
                outcome.set_exception(ZeroDivisionError())
            else:
                outcome.set_result(None)

        self.run(work())

    @precondition(lambda self: self.tasks)
    @rule(place=PLACE)
    def cancel(self, place: int) -> None:
        async def work() -> None:
            list(self.tasks.values())[place % len(self.tasks)].cancel()

        self.run(work())

    @precondition(lambda self: self.slots)
    @rule(place=PLACE)
    def release(self, place: int) -> None:
        async def work() -> None:
            self.slots[place % len(self.slots)].release()

        self.run(work())

    @precondition(lambda self: any(slot.needs for slot in self.inside))
    @rule(place=PLACE)
    def give(self, place: int) -> None:
        async def work() -> None:
            slots = [slot for slot in self.inside if slot.needs]
            slot = slots[place % len(slots)]
            slot.give(slot.needs[place % len(slot.needs)])

        self.run(work())

    @rule(need=st.sampled_from("ab"), places=st.integers(0, 3))
    def set_places(self, need: str, places: int) -> None:
        async def work() -> None:
            self.lanes.open(need, places)
            self.batcher.reopen()

        self.run(work())

    @rule(seconds=st.sampled_from([0.5, 2.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @precondition(lambda self: self.inside)
    @rule(place=PLACE, prompt=st.integers(0, 20))
    def correct(self, place: int, prompt: int) -> None:
        async def work() -> None:
            list(self.inside)[place % len(self.inside)].correct(prompt, 1)

        self.run(work())

    @invariant()
    def what_runs_has_its_needs_and_what_waits_can_not_start(self) -> None:
        for task in self.tasks.values():
            if task.done() and not task.cancelled():
                assert isinstance(task.exception(), Aborted | Expired | ZeroDivisionError | None)
        self.tasks = {slot: task for slot, task in self.tasks.items() if not task.done()}
        stats = self.batcher.stats
        check_books(self.batcher)
        running = [slot for slot in self.slots if slot.running]
        waiting = [slot for slot in self.slots if slot.waiting]
        assert stats.running == len(running)
        assert stats.queue_depth + stats.outside == len(waiting)
        assert self.batcher.load.cost == sum(slot.cost for slot in waiting)
        # The needs that are taken are those of the slots that run.
        assert +self.lanes.taken == Counter(need for slot in running for need in slot.held)
        # A record is passed by only for a need that is refused; all behind a head that doesn't fit wait too.
        assert not any(self.lanes.free(need) for need in self.lanes.refused)
        others = [slot for slot in waiting if not self.lanes.refused & {*slot.needs}]
        free = self.CAPACITY - stats.running_cost
        assert not others or (running and any(slot.cost > free for slot in others))
        # A need is wished for only while a record waits for it.
        assert self.lanes.wishes <= {need for slot in waiting for need in slot.needs}

    @invariant()
    def records_with_the_same_needs_start_as_they_came(self) -> None:
        keys = {(slot.tenant, slot.priority, slot.needs) for slot in self.started}
        for key in keys:
            alike = [slot for slot in self.slots if (slot.tenant, slot.priority, slot.needs) == key]
            started = [slot for slot in alike if slot.started_at < float("inf")]
            # The records that wait came after all that have started.
            waits = [alike.index(slot) for slot in alike if slot.waiting]
            assert not waits or all(alike.index(slot) < min(waits) for slot in started)

    def teardown(self) -> None:
        async def finish() -> None:
            self.lanes.open("a", 9)
            self.lanes.open("b", 9)
            self.batcher.reopen()
            stop = asyncio.create_task(self.batcher.stop())
            while not stop.done():
                for outcome in list(self.inside.values()):
                    outcome.set_result(None)
                await asyncio.sleep(1)

        try:
            self.run(finish())
            self.what_runs_has_its_needs_and_what_waits_can_not_start()
            assert self.tasks == {}
            check_empty(self.batcher)
        finally:
            self.loop.close()


TestLanesMachine = LanesMachine.TestCase
