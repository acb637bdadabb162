"""Rules of both batchers, stated once: space in the queue, deadlines, cancellation, starts and stops."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from batcher import Closed, ContinuousBatcher, DynamicBatcher, Expired, QueueFull
from tests.batcher.helpers import Machine, check_books, continuous_batcher, one_by_one, results_of
from tests.batcher.virtual import blocked, now, until, virtual


class Line:
    """A batcher of either kind that runs one record at a time through a `Machine`."""

    batcher: DynamicBatcher[Any, Any] | ContinuousBatcher

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    async def submit(self, record: object, **options: Any) -> "asyncio.Future[Any]":
        raise NotImplementedError

    def submit_nowait(self, record: object, **options: Any) -> "asyncio.Future[Any]":
        raise NotImplementedError

    @property
    def order(self) -> list[object]:
        """The records that were started, in that order."""
        return [record for batch in self.machine.batches for record in batch]


class DynamicLine(Line):
    def __init__(self, machine: Machine, **settings: Any) -> None:
        super().__init__(machine)
        self.batcher: DynamicBatcher[Any, Any] = one_by_one(machine, **settings)

    async def submit(self, record: object, **options: Any) -> "asyncio.Future[Any]":
        return await self.batcher.submit(record, **options)

    def submit_nowait(self, record: object, **options: Any) -> "asyncio.Future[Any]":
        return self.batcher.submit_nowait(record, **options)


class ContinuousLine(Line):
    def __init__(self, machine: Machine, **settings: Any) -> None:
        super().__init__(machine)
        self.batcher: ContinuousBatcher = continuous_batcher(1_000, max_running=1, **settings)

    async def run_one(self, record: object) -> object:
        return (await self.machine([record]))[0]

    async def submit(self, record: object, cost: int = 1, **options: Any) -> "asyncio.Future[Any]":
        return await self.batcher.submit(self.run_one, record, cost, **options)

    def submit_nowait(self, record: object, cost: int = 1, **options: Any) -> "asyncio.Future[Any]":
        return self.batcher.submit_nowait(self.run_one, record, cost, **options)


MakeLine = Callable[..., Line]
of_both = pytest.mark.parametrize("line_of", [DynamicLine, ContinuousLine], ids=["dynamic", "continuous"])


def ended_with(future: "asyncio.Future[Any]", kind: type[BaseException]) -> bool:
    return future.done() and not future.cancelled() and isinstance(future.exception(), kind)


# Space in the queue


@virtual
@of_both
async def test_a_full_queue_refuses_and_says_when_to_come_back(line_of: MakeLine) -> None:
    line = line_of(Machine(4.0), max_queue_size=2)
    async with line.batcher as batcher:
        assert batcher.estimate_wait(1) == 0.0
        for record in range(20):
            await (await line.submit(record))
        futures = [line.submit_nowait(record) for record in range(3)]
        with pytest.raises(QueueFull, match=r"max_queue_size=2; retry in 1\d\.\d\d s") as caught:
            line.submit_nowait("x")
        assert (caught.value.what, caught.value.limit) == ("max_queue_size", 2)
        assert 11.9 <= caught.value.retry_after_s <= 1.25 * 12.1
        assert batcher.stats.total_rejected == 1
        await results_of(futures)
        check_books(batcher)


@virtual
@of_both
async def test_the_waiting_cost_is_bounded(line_of: MakeLine) -> None:
    line = line_of(Machine(), max_queue_cost=20)
    async with line.batcher:
        futures = [line.submit_nowait(record, cost=10) for record in range(3)]
        with pytest.raises(QueueFull, match="max_queue_cost=20"):
            line.submit_nowait("x", cost=1)
        await results_of(futures)


@virtual
@of_both
async def test_callers_wait_for_space_and_are_served_as_they_came(line_of: MakeLine) -> None:
    line = line_of(Machine(held=True), max_queue_size=2)
    async with line.batcher as batcher:
        futures = [await line.submit(record) for record in range(3)]
        waiting = [asyncio.create_task(line.submit(record)) for record in range(3, 6)]
        await blocked()
        assert not any(task.done() for task in waiting)
        assert (batcher.stats.queue_depth, batcher.stats.outside) == (2, 3)
        with pytest.raises(QueueFull):
            line.submit_nowait("passes nobody")
        line.machine.go()
        futures += await asyncio.gather(*waiting)
        assert await results_of(futures) == [f"<{record}>" for record in range(6)]
        check_books(batcher)
    assert line.order == [0, 1, 2, 3, 4, 5]


@virtual
@of_both
async def test_a_caller_that_gives_up_waiting_for_space_makes_way(line_of: MakeLine) -> None:
    line = line_of(Machine(held=True), max_queue_cost=10)
    async with line.batcher as batcher:
        futures = [await line.submit("a", cost=10), await line.submit("b", cost=5)]
        large = asyncio.create_task(line.submit("C", cost=9))
        small = asyncio.create_task(line.submit("d", cost=5))
        await blocked()
        assert batcher.stats.outside == 2
        large.cancel()
        await blocked()
        assert batcher.stats.outside == 0
        line.machine.go()
        assert await results_of([*futures, await small]) == ["<a>", "<b>", "<d>"]
        check_books(batcher)


@virtual
@of_both
async def test_a_caller_that_does_not_wait_comes_in_where_there_is_space_for_it(line_of: MakeLine) -> None:
    line = line_of(Machine(held=True), max_queue_cost=10)
    async with line.batcher as batcher:
        futures = [await line.submit("a", cost=10), await line.submit("b", cost=5)]
        large = asyncio.create_task(line.submit("C", cost=9))
        await blocked()
        futures.append(line.submit_nowait("d", cost=5))
        assert (batcher.stats.outside, batcher.stats.queue_cost) == (1, 10)
        line.machine.go()
        await results_of([*futures, await large])
    # The order is that of arrival, whoever had space first.
    assert line.order == ["a", "b", "C", "d"]


@virtual
@of_both
async def test_space_that_meets_a_cancel_is_not_lost(line_of: MakeLine) -> None:
    line = line_of(Machine(), max_queue_size=1)
    async with line.batcher as batcher:
        futures = [await line.submit(record) for record in "ab"]
        outside = [asyncio.create_task(line.submit(record)) for record in "cd"]
        await until(lambda: batcher.stats.outside == 2)
        # In one step of the loop: c has its space, then its caller is cancelled before it goes on.
        await asyncio.sleep(0.9)
        await asyncio.sleep(0.1)
        await until(lambda: batcher.stats.outside == 1)
        outside[0].cancel()
        futures.append(await outside[1])
        await results_of(futures)
        assert outside[0].cancelled()
        assert batcher.stats.total_cancelled == 1
        check_books(batcher)
    assert line.order == ["a", "b", "d"]


@virtual
@of_both
async def test_a_record_that_is_cancelled_lets_the_next_one_in(line_of: MakeLine) -> None:
    line = line_of(Machine(held=True), max_queue_size=1)
    async with line.batcher:
        first, second = [await line.submit(record) for record in range(2)]
        outside = asyncio.create_task(line.submit("outside"))
        await blocked()
        second.cancel()
        await blocked()
        assert outside.done()
        line.machine.go()
        assert await results_of([first, await outside]) == ["<0>", "<outside>"]


@virtual
@of_both
async def test_a_deadline_ends_the_wait_for_space(line_of: MakeLine) -> None:
    line = line_of(Machine(5.0), max_queue_size=1)
    async with line.batcher as batcher:
        futures = [await line.submit(record) for record in range(2)]
        with pytest.raises(Expired):
            await line.submit("late", deadline=now() + 3)
        assert now() == pytest.approx(3, abs=0.01)
        # Space that comes with the deadline is too late.
        with pytest.raises(Expired):
            await line.submit("as late", deadline=5.0)
        await results_of(futures)
        assert batcher.stats.total_rejected == 2
        check_books(batcher)
    assert line.order == [0, 1]


@virtual
@of_both
async def test_space_that_an_expired_record_leaves_is_given_to_the_one_that_waits(line_of: MakeLine) -> None:
    line = line_of(Machine(held=True), max_queue_size=1)
    async with line.batcher:
        first = await line.submit(0)
        await blocked()
        late = await line.submit(1, deadline=now() + 0.05)
        outside = asyncio.create_task(line.submit(2))
        await asyncio.sleep(0.15)
        assert ended_with(late, Expired)
        assert outside.done()
        line.machine.go()
        assert await results_of([first, await outside]) == ["<0>", "<2>"]


@virtual
@of_both
async def test_tier_and_tenant_count_for_a_record_that_waits_for_space_too(line_of: MakeLine) -> None:
    line = line_of(Machine(0.01), max_queue_cost=100)
    async with line.batcher:

        async def send(record: str, **options: Any) -> int:
            await (await line.submit(record, **options))
            return len(line.order)

        tasks = [asyncio.create_task(send("small", cost=5, tenant="many")) for _ in range(300)]
        await blocked()
        large = asyncio.create_task(send("large", cost=90, tenant="one"))
        urgent = asyncio.create_task(send("urgent", cost=5, tenant="many", priority=-5))
        assert await urgent <= 3
        assert await large < 30
        await asyncio.gather(*tasks)


# Deadlines and cancellation


@virtual
@of_both
async def test_a_record_that_can_not_start_in_time_fails_at_its_deadline(line_of: MakeLine) -> None:
    line = line_of(Machine(10.0))
    async with line.batcher as batcher:
        first = await line.submit("first", deadline=now() + 1)
        ends: list[tuple[int, float]] = []
        futures = []
        # An earlier deadline sets the alarm forward.
        for seconds in (5, 2, 3):

            def note(_: object, seconds: int = seconds) -> None:
                ends.append((seconds, round(now(), 2)))

            futures.append(await line.submit(seconds, deadline=now() + seconds))
            futures[-1].add_done_callback(note)
        fine = await line.submit("fine", timeout=11.0)
        results = await results_of([*futures, first, fine])
        assert all(isinstance(error, Expired) for error in results[:3])
        assert results[3:] == ["<first>", "<fine>"]
        assert ends == [(2, 2), (3, 3), (5, 5)]
        assert batcher.stats.total_expired == 3
        for late in ({"deadline": now()}, {"timeout": 0.0}):
            with pytest.raises(Expired):
                await line.submit("past", **late)
        assert batcher.stats.total_rejected == 2
        check_books(batcher)
    assert line.order == ["first", "fine"]


@virtual
@of_both
async def test_a_cancelled_record_gives_its_place_back_at_once(line_of: MakeLine) -> None:
    line = line_of(Machine())
    async with line.batcher as batcher:
        first = await line.submit("first")
        await blocked()
        futures = [await line.submit(record, cost=5) for record in range(3)]
        await blocked()
        assert futures[1].cancel()
        await blocked()
        assert (batcher.stats.queue_depth, batcher.stats.queue_cost) == (2, 10)
        await results_of([first, futures[0], futures[2]])
        assert not futures[1].cancel()
        assert batcher.stats.total_cancelled == 1
        check_books(batcher)
    assert line.order == ["first", 0, 2]


@virtual
@of_both
async def test_a_caller_that_is_cancelled_cancels_its_record(line_of: MakeLine) -> None:
    line = line_of(Machine())
    async with line.batcher as batcher:
        first = await line.submit("first")

        async def caller() -> None:
            await (await line.submit("mine"))

        task = asyncio.create_task(caller())
        await blocked()
        task.cancel()
        await blocked()
        assert batcher.stats.total_cancelled == 1
        await first
        check_books(batcher)
    assert line.order == ["first"]


@virtual
@of_both
async def test_an_error_of_a_function_is_that_of_its_record(line_of: MakeLine) -> None:
    class Failing(Machine):
        async def __call__(self, batch: list[Any]) -> list[Any]:
            raise KeyError(*batch)

    line = line_of(Failing())
    async with line.batcher as batcher:
        results = await results_of([await line.submit(record) for record in (7, 8)])
        assert [(type(error), error.args) for error in results] == [(KeyError, (7,)), (KeyError, (8,))]
        assert batcher.stats.total_failed == 2
        check_books(batcher)


@virtual
@of_both
async def test_a_deadline_is_given_in_one_way(line_of: MakeLine) -> None:
    line = line_of(Machine())
    async with line.batcher as batcher:
        with pytest.raises(ValueError, match="either deadline"):
            await line.submit("x", deadline=1e6, timeout=1.0)
        with pytest.raises(ValueError, match="either deadline"):
            line.submit_nowait("x", deadline=1e6, timeout=1.0)
        assert batcher.stats.total_submitted == 0


# Starts and stops


@of_both
async def test_a_batcher_that_was_not_started_says_so(line_of: MakeLine) -> None:
    line = line_of(Machine())
    name = type(line.batcher).__name__
    assert not line.batcher.is_running
    with pytest.raises(Closed, match=rf"{name} is not running; call start\(\)"):
        await line.submit(1)
    with pytest.raises(RuntimeError, match="not running"):
        line.submit_nowait(1)
    await line.batcher.stop()
    await line.batcher.start()
    with pytest.raises(RuntimeError, match=f"{name} is already running"):
        await line.batcher.start()
    await line.batcher.stop()


@virtual
@of_both
async def test_stop_lets_what_waits_run_first_also_outside_the_queue(line_of: MakeLine) -> None:
    line = line_of(Machine(), max_queue_size=1)
    await line.batcher.start()
    tasks = [asyncio.create_task(line.submit(record)) for record in range(5)]
    await blocked()
    stopping = asyncio.create_task(line.batcher.stop())
    await blocked()
    assert not line.batcher.is_running
    with pytest.raises(Closed, match="stopping"):
        await line.submit("x")
    with pytest.raises(RuntimeError, match="already stopping"):
        await line.batcher.start()
    await stopping
    futures = await asyncio.gather(*tasks)
    assert await results_of(futures) == [f"<{record}>" for record in range(5)]
    check_books(line.batcher)


@virtual
@of_both
async def test_stop_without_draining_fails_what_waits_and_finishes_what_runs(line_of: MakeLine) -> None:
    line = line_of(Machine(), max_queue_size=1)
    await line.batcher.start()
    tasks = [asyncio.create_task(line.submit(record)) for record in range(4)]
    await blocked()
    await line.batcher.stop(drain=False)
    await blocked()
    assert await tasks[0].result() == "<0>"
    assert ended_with(tasks[1].result(), Closed)
    assert all(ended_with(task, Closed) for task in tasks[2:])
    assert line.order == [0]
    check_books(line.batcher)


@virtual
@of_both
async def test_an_error_in_the_block_is_not_held_up_by_what_waits(line_of: MakeLine) -> None:
    line = line_of(Machine(100.0))
    futures: list[asyncio.Future[Any]] = []

    async def block() -> None:
        async with line.batcher:
            futures.extend([await line.submit(record) for record in range(50)])
            await blocked()
            raise KeyError("mine")

    with pytest.raises(KeyError):
        await block()
    assert now() == pytest.approx(100.0, abs=0.01)
    assert sum(ended_with(future, Closed) for future in futures) == 49


@virtual
@of_both
async def test_stop_gives_up_what_runs_at_its_timeout(line_of: MakeLine) -> None:
    line = line_of(Machine(1_000.0))
    await line.batcher.start()
    running, waiting = [await line.submit(record) for record in range(2)]
    await blocked()
    await line.batcher.stop(timeout=3)
    assert now() == pytest.approx(3.0, abs=0.01)
    assert running.cancelled() or ended_with(running, Closed)
    assert ended_with(waiting, Closed)
    assert line.machine.running == 0
    busy_s = line.batcher.stats.busy_time_s
    await asyncio.sleep(100)
    assert (line.batcher.stats.running, line.batcher.stats.busy_time_s) == (0, busy_s)
    check_books(line.batcher)


@virtual
@of_both
async def test_two_stops_end_together_and_a_start_follows(line_of: MakeLine) -> None:
    line = line_of(Machine())
    for record in range(3):
        await line.batcher.start()
        future = await line.submit(record)
        await asyncio.gather(line.batcher.stop(), line.batcher.stop())
        assert future.result() == f"<{record}>"
        await line.batcher.stop()
        await asyncio.sleep(100)
    stats = line.batcher.stats
    assert (stats.total_submitted, stats.total_completed) == (3, 3)
    assert stats.busy_time_s == pytest.approx(3.0)
    assert stats.idle_time_s < 0.1


@virtual
@of_both
async def test_a_stop_does_not_end_the_life_after(line_of: MakeLine) -> None:
    line = line_of(Machine())
    await line.batcher.start()
    await line.submit("x")

    async def restart() -> None:
        await line.batcher.stop()
        await line.batcher.start()

    await asyncio.gather(restart(), line.batcher.stop())
    assert line.batcher.is_running
    await line.batcher.stop()


@virtual
@of_both
async def test_a_second_stop_can_be_shorter(line_of: MakeLine) -> None:
    line = line_of(Machine(1_000.0))
    await line.batcher.start()
    await line.submit("x")
    first = asyncio.create_task(line.batcher.stop())
    await blocked()
    await line.batcher.stop(timeout=1.0)
    await blocked()
    assert first.done()
    assert now() == pytest.approx(1.0, abs=0.01)


@virtual
@of_both
async def test_a_stop_that_is_cancelled_can_be_called_again(line_of: MakeLine) -> None:
    line = line_of(Machine())
    await line.batcher.start()
    await line.submit("x")
    first = asyncio.create_task(line.batcher.stop())
    await blocked()
    first.cancel()
    await asyncio.sleep(2)
    await line.batcher.stop()
    await line.batcher.start()
    await line.batcher.stop()


@virtual
@of_both
async def test_the_last_record_that_is_cancelled_lets_a_stop_end(line_of: MakeLine) -> None:
    line = line_of(Machine())
    await line.batcher.start()
    running = await line.submit("running")
    await blocked()
    waiting = await line.submit("waiting")
    stopping = asyncio.create_task(line.batcher.stop())
    await blocked()
    waiting.cancel()
    await stopping
    assert running.done()
    assert line.order == ["running"]


@of_both
def test_a_deadline_is_watched_on_the_next_loop_too(line_of: MakeLine) -> None:
    lines: list[Line] = []

    @virtual
    async def first_life() -> None:
        lines.append(line_of(Machine(5.0)))
        async with lines[0].batcher:
            await (await lines[0].submit("in time", deadline=8.0))

    @virtual
    async def second_life() -> None:
        line = lines[0]
        async with line.batcher:
            futures = [await line.submit(record) for record in range(2)]
            late = await line.submit("late", deadline=9.0)
            with pytest.raises(Expired):
                await late
            assert now() == pytest.approx(9.0, abs=0.01)
            await results_of(futures)

    first_life()
    second_life()
