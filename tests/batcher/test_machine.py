"""Both batchers driven at random: nothing is lost or runs twice, bounds hold, and the books agree."""

import asyncio
from collections.abc import Coroutine
from typing import Any, ClassVar, TypeVar

import hypothesis.strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from batcher import (
    BatcherError,
    Closed,
    ContinuousBatcher,
    DynamicBatcher,
    Expired,
    QueueFull,
    Slot,
    SlotOptions,
)
from tests.batcher.virtual import VirtualLoop

T = TypeVar("T")

PAUSE_S = 0.06
"""Longer than a batch waits for others, so that after each step whatever can start has started."""

PRIORITIES = st.integers(-1, 1)
TENANTS = st.sampled_from(["a", "b", "c"])
COSTS = st.integers(0, 12)
DEADLINES = st.sampled_from([None, None, 1.0, 5.0])
PLACES = st.integers(0, 10**6)
NEEDS = st.sampled_from([(), (), ("a",), ("b",)])


class Machine(RuleBasedStateMachine):
    """A batcher on a loop on virtual time, moved on after each step until every task is blocked."""

    batcher: DynamicBatcher[int, int] | ContinuousBatcher

    def __init__(self) -> None:
        super().__init__()
        self.loop = VirtualLoop()
        self.stops: list[asyncio.Task[None]] = []

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        async def step() -> T:
            result = await work
            await asyncio.sleep(PAUSE_S)
            return result

        return self.loop.run_until_complete(step())

    def deadline(self, after: float | None) -> float | None:
        return None if after is None else self.loop.time() + after

    @rule(seconds=st.sampled_from([0.1, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.run(asyncio.sleep(seconds))

    @rule(drain=st.booleans(), timeout=st.sampled_from([None, 0.0, 2.0]))
    def stop(self, drain: bool, timeout: float | None) -> None:
        async def work() -> None:
            self.stops.append(asyncio.create_task(self.batcher.stop(drain, timeout)))

        self.run(work())

    @rule()
    def restart(self) -> None:
        async def work() -> None:
            if not any(not stop.done() for stop in self.stops) and not self.batcher.is_running:
                await self.batcher.start()

        self.run(work())

    def teardown(self) -> None:
        try:
            self.end()
        finally:
            self.loop.close()

    def end(self) -> None:
        raise NotImplementedError


class DynamicMachine(Machine):
    """submit, cancel, expire, complete, fail, stop and restart of a DynamicBatcher."""

    BUDGET: ClassVar[int] = 10
    SIZE: ClassVar[int] = 4
    QUEUE: ClassVar[int] = 9

    def __init__(self) -> None:
        super().__init__()
        self.number = 0
        self.costs: dict[int, int] = {}
        self.futures: dict[int, asyncio.Future[int]] = {}
        self.submitting: dict[int, asyncio.Task[Any]] = {}
        self.order: list[int] = []
        self.cancelled: set[int] = set()
        self.running: dict[asyncio.Future[None], list[int]] = {}
        self.attempts: dict[int, int] = {}
        self.failures: dict[int, int] = {}
        self.batcher: DynamicBatcher[int, int] = DynamicBatcher(
            self.process,
            target_batch_cost=self.BUDGET,
            max_batch_size=self.SIZE,
            max_queue_size=self.QUEUE,
            max_concurrent_batches=2,
            prefetch_batches=1,
            priority_aging_s=3.0,
            clock=self.loop.time,
        )
        self.run(self.batcher.start())

    async def process(self, batch: list[int]) -> list[int]:
        assert 0 < len(batch) <= self.SIZE
        assert len(batch) == 1 or sum(self.costs[number] for number in batch) <= self.BUDGET
        assert len(self.running) < 2
        for number in batch:
            assert number not in self.cancelled
            self.attempts[number] = self.attempts.get(number, 0) + 1
            assert self.attempts[number] <= self.failures.get(number, 0) + 1
        outcome: asyncio.Future[None] = self.loop.create_future()
        self.running[outcome] = list(batch)
        try:
            await outcome
        except ValueError:
            for number in batch:
                self.failures[number] = self.failures.get(number, 0) + 1
            raise
        finally:
            del self.running[outcome]
        return [number * 2 for number in batch]

    @rule(cost=COSTS, priority=PRIORITIES, tenant=TENANTS, after=DEADLINES)
    def submit(self, cost: int, priority: int, tenant: str, after: float | None) -> None:
        self.number += 1
        number = self.number
        self.costs[number] = cost

        async def work() -> None:
            self.futures[number] = await self.batcher.submit(
                number, estimated_cost=cost, priority=priority, tenant=tenant, deadline=self.deadline(after)
            )

        async def start() -> None:
            self.submitting[number] = asyncio.create_task(work())

        self.run(start())

    @rule(cost=COSTS, priority=PRIORITIES, tenant=TENANTS)
    def submit_nowait(self, cost: int, priority: int, tenant: str) -> None:
        self.number += 1
        self.costs[self.number] = cost

        async def work() -> None:
            # Four fifths of it are for all; beyond them a tenant has its share.
            full = self.batcher.stats.queue_depth >= 0.8 * self.QUEUE - 1
            try:
                self.futures[self.number] = self.batcher.submit_nowait(
                    self.number, estimated_cost=cost, priority=priority, tenant=tenant
                )
            except QueueFull:
                assert full
            except Closed:
                assert not self.batcher.is_running

        self.run(work())

    @precondition(lambda self: self.futures)
    @rule(place=PLACES)
    def cancel(self, place: int) -> None:
        number = list(self.futures)[place % len(self.futures)]

        async def work() -> None:
            if self.futures[number].cancel() and not any(number in batch for batch in self.running.values()):
                self.cancelled.add(number)

        self.run(work())

    @precondition(lambda self: self.submitting)
    @rule(place=PLACES)
    def cancel_submit(self, place: int) -> None:
        async def work() -> None:
            list(self.submitting.values())[place % len(self.submitting)].cancel()

        self.run(work())

    @precondition(lambda self: self.running)
    @rule(place=PLACES)
    def complete(self, place: int) -> None:
        async def work() -> None:
            list(self.running)[place % len(self.running)].set_result(None)

        self.run(work())

    @precondition(lambda self: self.running)
    @rule(place=PLACES)
    def fail(self, place: int) -> None:
        async def work() -> None:
            list(self.running)[place % len(self.running)].set_exception(ValueError("failed"))

        self.run(work())

    @invariant()
    def books_agree(self) -> None:
        for task in self.submitting.values():
            if task.done() and not task.cancelled():
                assert isinstance(task.exception(), BatcherError | None)
        self.submitting = {number: task for number, task in self.submitting.items() if not task.done()}
        stats = self.batcher.stats
        done = [future for future in self.futures.values() if future.done()]
        errors = [future.exception() for future in done if not future.cancelled()]
        ended = stats.total_completed + stats.total_failed + stats.total_cancelled + stats.total_expired
        assert stats.total_submitted == ended + stats.queue_depth + stats.running
        assert stats.total_completed == errors.count(None)
        assert stats.total_expired == sum(isinstance(error, Expired) for error in errors)
        failed = sum(error is not None and not isinstance(error, Expired) for error in errors)
        assert stats.total_failed == failed
        assert len(self.futures) - len(done) <= stats.queue_depth + stats.running
        assert stats.queue_depth <= self.QUEUE + self.SIZE
        assert stats.queue_cost >= 0
        assert stats.outside == len(self.submitting)
        if not self.batcher.is_running and all(stop.done() for stop in self.stops):
            assert all(future.done() for future in self.futures.values())
        if self.batcher.is_running and stats.queue_depth:
            # Nothing waits while a processor is free.
            assert len(self.running) == 2

    def end(self) -> None:
        async def finish() -> None:
            stop = asyncio.create_task(self.batcher.stop())
            while not stop.done():
                for outcome in list(self.running):
                    if not outcome.done():
                        outcome.set_result(None)
                await asyncio.sleep(1)
            await asyncio.gather(*self.stops)

        self.run(finish())
        self.books_agree()
        assert self.submitting == {}
        for number, future in self.futures.items():
            assert future.done()
            if not future.cancelled() and future.exception() is None:
                assert future.result() == 2 * number
                assert self.attempts[number] == self.failures.get(number, 0) + 1


class Lane:
    """Lanes with so many places for any need; a wish reserves the next place for its need."""

    def __init__(self) -> None:
        self.places = 2
        self.taken: list[str] = []
        self.wishes: list[str] = []

    def take(self, need: str) -> bool:
        if len(self.taken) < self.places and need == [*self.wishes, need][0]:
            self.taken.append(need)
            if need in self.wishes:
                self.wishes.remove(need)
            return True
        if need not in self.wishes:
            self.wishes.append(need)
        return False

    def give(self, need: str) -> bool:
        self.taken.remove(need)
        return True

    def unwanted(self, need: str) -> bool:
        self.wishes.remove(need)
        return True


def counted(slots: list[Slot]) -> tuple[int, int]:
    """Return the records of some slots, and their cost."""
    return sum(slot.records for slot in slots), sum(slot.cost for slot in slots)


class ContinuousMachine(Machine):
    """The same for the slots of a ContinuousBatcher, with needs too, and changes of its capacity."""

    QUEUE: ClassVar[int] = 6
    BACKGROUND: ClassVar[int | None] = None
    batcher: ContinuousBatcher

    def __init__(self) -> None:
        super().__init__()
        self.capacity = 20
        self.max_running: int | None = 4
        self.lane = Lane()
        self.batcher = ContinuousBatcher(
            capacity=self.capacity,
            max_running=self.max_running,
            max_queue_size=self.QUEUE,
            oversize="alone",
            priority_aging_s=3.0,
            background=self.BACKGROUND,
            lanes=self.lane,
            clock=self.loop.time,
        )
        self.tasks: list[asyncio.Task[None]] = []
        self.inside: dict[asyncio.Future[None], int] = {}
        self.slots: dict[asyncio.Future[None], Slot] = {}
        self.run(self.batcher.start())

    @rule(
        cost=st.integers(0, 25),
        priority=PRIORITIES,
        tenant=TENANTS,
        after=DEADLINES,
        wait=st.booleans(),
        needs=NEEDS,
    )
    def enter(
        self,
        cost: int,
        priority: int,
        tenant: str,
        after: float | None,
        wait: bool,
        needs: tuple[str, ...],
    ) -> None:
        async def hold() -> None:
            outcome: asyncio.Future[None] = self.loop.create_future()
            make_slot = self.batcher.slot if wait else self.batcher.slot_nowait
            options: SlotOptions = {"priority": priority, "tenant": tenant, "needs": needs}
            options["deadline"] = self.deadline(after)
            async with make_slot(cost, **options) as slot:
                assert slot.cost == cost
                beside = [other.cost for other in self.slots.values() if self.counts(other, slot)]
                assert sum(beside) + cost <= self.capacity or not beside
                assert self.max_running is None or len(beside) < self.max_running or not beside
                self.inside[outcome], self.slots[outcome] = cost, slot
                slot.first_token()
                try:
                    await outcome
                finally:
                    del self.inside[outcome], self.slots[outcome]

        async def start() -> None:
            self.tasks.append(asyncio.create_task(hold()))

        self.run(start())

    def counts(self, other: Slot, slot: Slot) -> bool:
        """Return whether a slot must fit beside another one that runs."""
        return True

    @precondition(lambda self: self.inside)
    @rule(place=PLACES, fails=st.booleans())
    def leave(self, place: int, fails: bool) -> None:
        async def work() -> None:
            outcome = list(self.inside)[place % len(self.inside)]
            if fails:
                outcome.set_exception(ValueError("failed"))
            else:
                outcome.set_result(None)

        self.run(work())

    @precondition(lambda self: self.lane.taken)
    @rule(place=PLACES)
    def give_a_need_back(self, place: int) -> None:
        async def work() -> None:
            slots = [slot for slot in self.slots.values() if slot.held]
            slots[place % len(slots)].give(slots[place % len(slots)].held[0])

        self.run(work())

    @rule(places=st.integers(1, 3))
    def set_places(self, places: int) -> None:
        async def work() -> None:
            self.lane.places = places
            self.batcher.reopen()

        self.run(work())

    @precondition(lambda self: self.tasks)
    @rule(place=PLACES, other=PLACES)
    def leave_and_cancel_in_one_step(self, place: int, other: int) -> None:
        async def work() -> None:
            if self.inside:
                list(self.inside)[place % len(self.inside)].set_result(None)
                await asyncio.sleep(0)
                await asyncio.sleep(0)
            self.tasks[other % len(self.tasks)].cancel()

        self.run(work())

    @rule(capacity=st.integers(1, 30), max_running=st.sampled_from([None, 1, 3]))
    def set_capacity(self, capacity: int, max_running: int | None) -> None:
        async def work() -> None:
            self.capacity, self.max_running = capacity, max_running
            self.batcher.set_capacity(capacity, max_running)

        self.run(work())

    @invariant()
    def books_agree(self) -> None:
        for task in self.tasks:
            if task.done() and not task.cancelled():
                assert isinstance(task.exception(), BatcherError | ValueError | None)
        self.tasks = [task for task in self.tasks if not task.done()]
        stats = self.batcher.stats
        ended = stats.total_completed + stats.total_failed + stats.total_cancelled + stats.total_expired
        assert stats.total_submitted == ended + stats.queue_depth + stats.running
        assert (stats.running, stats.running_cost) == (len(self.inside), sum(self.inside.values()))
        assert len(self.tasks) == stats.running + stats.queue_depth + stats.outside
        assert stats.queue_depth <= self.QUEUE
        assert 0 <= stats.utilization <= 1
        if stats.queue_depth and self.batcher.is_running:
            assert self.inside
        held = [need for slot in self.slots.values() for need in slot.held]
        assert sorted(self.lane.taken) == sorted(held)
        if not self.tasks:
            assert self.lane.wishes == []

    def end(self) -> None:
        async def finish() -> None:
            stop = asyncio.create_task(self.batcher.stop())
            while not stop.done() or self.inside:
                for outcome in list(self.inside):
                    outcome.set_result(None)
                await asyncio.sleep(1)
            await asyncio.gather(*self.stops)

        self.run(finish())
        self.books_agree()
        assert self.tasks == []


class BackgroundMachine(ContinuousMachine):
    """The same with a background: its lowest tier gives way, except for records that were promoted."""

    BACKGROUND: ClassVar[int | None] = 1

    @staticmethod
    def gives_way(slot: Slot) -> bool:
        return slot.priority >= 1 and not slot.promoted

    def counts(self, other: Slot, slot: Slot) -> bool:
        return self.gives_way(slot) or not self.gives_way(other)

    @invariant()
    def the_background_is_counted(self) -> None:
        behind = [slot for slot in self.slots.values() if self.gives_way(slot)]
        stats = self.batcher.stats
        assert (stats.background_running, stats.background_cost) == counted(behind)
        assert all(slot.priority >= 1 for slot in self.slots.values() if slot.promoted)


TestDynamicMachine = DynamicMachine.TestCase
TestContinuousMachine = ContinuousMachine.TestCase
TestBackgroundMachine = BackgroundMachine.TestCase
