"""DynamicBatcher: when a batch is decided, what is in it, and that every future ends."""

import asyncio
import gc
import inspect
import math
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import pytest

from batcher import Closed, DynamicBatcher, Expired, Oversize, QueueFull, TokenBatcher
from tests.batcher.helpers import Machine, check_books, dynamic_batcher, one_by_one, results_of
from tests.batcher.lines import count_lines
from tests.batcher.virtual import blocked, now, virtual
from tests.fakes.clock import Clock
from tests.progress import STILL_S

# When a batch is decided


@virtual
async def test_a_lone_record_leaves_at_once() -> None:
    machine = Machine()
    async with dynamic_batcher(machine) as batcher:
        for _ in range(20):
            before = now()
            await (await batcher.submit("x"))
            assert now() - before == pytest.approx(1.0)
            await asyncio.sleep(0.01)


@virtual
async def test_what_arrives_together_leaves_together() -> None:
    machine = Machine()

    async def caller(batcher: DynamicBatcher[Any, Any], delay_passes: int) -> None:
        for _ in range(delay_passes):
            await asyncio.sleep(0)
        await (await batcher.submit("x"))

    async with dynamic_batcher(machine) as batcher:
        await asyncio.gather(*(caller(batcher, i % 6) for i in range(40)))
    assert machine.sizes == [40]


@virtual
async def test_a_batch_stays_open_while_the_processor_is_busy() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, batch_timeout_s=0.02) as batcher:
        futures = [await batcher.submit("first")]
        await blocked()
        for _ in range(9):
            futures.append(await batcher.submit("later"))
            await asyncio.sleep(0.1)
        await results_of(futures)
    assert machine.sizes == [1, 9]


@virtual
async def test_a_full_batch_leaves_without_a_look_round() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, max_batch_size=4, min_batch_size=4, batch_timeout_s=9) as batcher:
        futures = [await batcher.submit(i) for i in range(4)]
        await asyncio.sleep(0)
        assert machine.sizes == [4]
        await results_of(futures)


@virtual
async def test_burst_of_100_records_drains_in_time() -> None:
    machine = Machine(0.3)
    async with dynamic_batcher(machine, max_batch_size=64, batch_timeout_s=0.02) as batcher:
        futures = []
        for i in range(100):
            futures.append(await batcher.submit(i))
            await asyncio.sleep(1 / 200)
        await results_of(futures)
        assert now() <= 0.95
    assert len(machine.sizes) == 3


# What is in a batch


@virtual
async def test_cost_and_size_bound_a_batch() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, target_batch_cost=100, max_batch_size=4) as batcher:
        costs = [60, 50, 10, 10, 10, 10, 10, 100, 1]
        futures = [await batcher.submit(cost, estimated_cost=cost) for cost in costs]
        await results_of(futures)
    assert machine.batches == [[60], [50, 10, 10, 10], [10, 10], [100], [1]]


@virtual
@pytest.mark.parametrize("forming", ["arrival", "sorted", "bucketed"])
async def test_a_more_urgent_record_passes_batches_that_were_chosen_ahead(forming: str) -> None:
    machine = Machine(held=True)
    async with dynamic_batcher(machine, max_batch_size=3, prefetch_batches=2, forming=forming) as batcher:
        futures = [await batcher.submit(i) for i in range(3)]
        await blocked()
        futures += [await batcher.submit(i) for i in range(3, 11)]
        urgent = await batcher.submit("urgent", priority=-1)
        machine.go()
        await results_of([*futures, urgent])
    assert machine.batches == [[0, 1, 2], ["urgent", 3, 4], [5, 6, 7], [8, 9, 10]]


async def chosen(lengths: Sequence[int], prefetch: int, cancel: int | None = None) -> list[int]:
    """Return the lengths of the next batch, when 50 and 51 come after it could be chosen."""
    machine = Machine(held=True)
    async with dynamic_batcher(
        machine, max_batch_size=3, prefetch_batches=prefetch, forming="sorted", cost_estimator=int
    ) as batcher:
        futures = [await batcher.submit(1) for _ in range(3)]
        await blocked()
        futures += [await batcher.submit(length) for length in [*lengths, 50, 51]]
        if cancel is not None:
            futures.pop(cancel).cancel()
        machine.go()
        await results_of(futures)
        check_books(batcher)
    return sorted(machine.batches[1])


@virtual
async def test_a_full_batch_by_length_is_chosen_ahead() -> None:
    assert await chosen([50, 60, 61], prefetch=0) == [50, 50, 51]
    assert await chosen([50, 60, 61], prefetch=1) == [50, 60, 61]


@virtual
async def test_a_batch_that_was_chosen_ahead_is_chosen_anew_when_a_record_of_it_leaves() -> None:
    assert await chosen([50, 60, 61], prefetch=1, cancel=4) == [50, 50, 51]


@virtual
async def test_a_batch_that_is_not_full_is_not_chosen_ahead() -> None:
    assert await chosen([50, 60, 7], prefetch=1) == [50, 50, 51]


@virtual
@pytest.mark.parametrize("forming", ["sorted", "bucketed"])
async def test_a_record_without_space_does_not_have_the_next_batch_chosen_again(forming: str) -> None:
    async def lines_per_record(prefetch: int) -> float:
        machine = Machine(held=True)
        async with dynamic_batcher(
            machine, max_queue_size=1_000, max_batch_size=8, prefetch_batches=prefetch, forming=forming
        ) as batcher:
            futures = [await batcher.submit(-1, cost=1) for _ in range(8)]
            await blocked()
            # The first one goes alone, whatever comes: no other is as short.
            futures += [await batcher.submit(number, cost=1 + 100 * number) for number in range(1_000)]
            with count_lines() as lines:
                for number in range(100):
                    with pytest.raises(QueueFull):
                        batcher.submit_nowait(number, cost=100)
            machine.go()
            await results_of(futures)
        return lines.count / 100

    assert 10 < await lines_per_record(1) < 1.2 * await lines_per_record(0)


@virtual
async def test_a_prefetched_batch_starts_before_the_callers_of_the_last_one_go_on() -> None:
    machine = Machine()
    started = []
    async with dynamic_batcher(machine, max_batch_size=2) as batcher:
        futures = [await batcher.submit(i) for i in range(4)]

        async def caller() -> None:
            await futures[0]
            started.append(len(machine.batches))

        await asyncio.gather(caller(), *futures)
    assert started == [2]


@virtual
async def test_several_batches_may_run_at_once() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, max_batch_size=2, max_concurrent_batches=3) as batcher:
        futures = [await batcher.submit(i) for i in range(12)]
        await results_of(futures)
        assert now() == pytest.approx(2.0, abs=0.01)
    assert machine.most == 3


@virtual
async def test_an_oversize_record_is_refused_if_so_set() -> None:
    async with dynamic_batcher(Machine(), target_batch_cost=10, oversize="reject") as batcher:
        with pytest.raises(Oversize, match="costs 11, at most 10 is allowed"):
            await batcher.submit("x", estimated_cost=11)
        assert await (await batcher.submit("x", estimated_cost=10)) == "<x>"
        assert batcher.stats.total_rejected == 1


@virtual
async def test_static_batches_have_one_size_whatever_the_cost() -> None:
    machine = Machine()
    settings = {"forming": "static", "max_batch_size": 4, "target_batch_cost": 5, "batch_timeout_s": 0.2}
    async with dynamic_batcher(machine, **settings) as batcher:
        futures = [await batcher.submit(i, estimated_cost=100) for i in range(10)]
        await results_of(futures)
    assert machine.sizes == [4, 4, 2]


@virtual
@pytest.mark.parametrize("forming", ["sorted", "bucketed"])
async def test_batches_by_length_give_each_record_its_own_result(forming: str) -> None:
    machine = Machine()
    async with dynamic_batcher(
        machine, forming=forming, max_batch_size=4, padded=True, prefetch_batches=0
    ) as batcher:
        await batcher.submit(0)
        await blocked()
        lengths = [5, 90, 6, 80, 7, 85, 8, 88, 300]
        futures = [await batcher.submit(length, estimated_cost=length) for length in lengths]
        assert await asyncio.gather(*futures) == [f"<{length}>" for length in lengths]
    for batch in machine.batches[1:]:
        assert max(batch) / min(batch) < 2


# Cost


class Sized:
    def __init__(self, cost: Any) -> None:
        self.cost = cost

    def estimate_cost(self) -> Any:
        return self.cost


@virtual
async def test_a_cost_is_given_or_estimated_or_known_by_the_record_or_the_default() -> None:
    async def nothing(batch: list[Any]) -> list[Any]:
        return batch

    async def cost_of(record: Any, given: int | None = None, **settings: Any) -> int:
        async with dynamic_batcher(nothing, **settings) as batcher:
            await (await batcher.submit(record, estimated_cost=given))
            return batcher.stats.total_batch_cost

    assert await cost_of(Sized(3), 9, cost_estimator=lambda record: 7, default_cost=5) == 9
    assert await cost_of(Sized(3), cost_estimator=lambda record: 7, default_cost=5) == 7
    assert await cost_of(Sized(3), default_cost=5) == 3
    assert await cost_of("x", default_cost=5) == 5
    assert await cost_of("x") == 1
    assert await cost_of("x", 0) == 0
    assert await cost_of(Sized(2.1)) == 3

    def counted(record: object) -> int:
        calls.append(record)
        return 2

    calls: list[object] = []
    assert await cost_of("once", cost_estimator=counted) == 2
    assert calls == ["once"]


@virtual
async def test_a_cost_that_is_none_is_refused() -> None:
    async with dynamic_batcher(Machine(), cost_estimator=lambda record: record) as batcher:
        with pytest.raises(ValueError, match="estimated_cost must be a finite number >= 0, not -5"):
            await batcher.submit("x", estimated_cost=-5)
        with pytest.raises(ValueError, match="cost_estimator's result must be a finite number >= 0, not nan"):
            await batcher.submit(float("nan"))
        with pytest.raises(ValueError, match="not 'many'"):
            await batcher.submit("many")
        with pytest.raises(ValueError, match="not True"):
            await batcher.submit("x", estimated_cost=True)
        assert await (await batcher.submit(3)) == "<3>"
        check_books(batcher)


@virtual
async def test_cost_has_one_name_and_an_alias() -> None:
    async with dynamic_batcher(Machine()) as batcher:
        await (await batcher.submit("x", cost=3))
        await (await batcher.submit("x", estimated_cost=4))
        await asyncio.gather(*await batcher.submit_batch("xy", cost=[5, 6]))
        assert batcher.stats.total_batch_cost == 18
        with pytest.raises(ValueError, match="either cost or estimated_cost"):
            await batcher.submit("x", cost=3, estimated_cost=3)
        with pytest.raises(ValueError, match="either cost or estimated_cost"):
            await batcher.submit_batch("x", cost=[3], estimated_cost=[3])
    async with TokenBatcher[Any, Any](Machine(), clock=now) as tokens:
        await (await tokens.submit("x", cost=7))
        await (await tokens.submit("x", cost=9, estimated_tokens=8))
        assert tokens.stats.total_batch_cost == 15


# Backpressure


@virtual
async def test_the_estimated_wait_is_within_a_factor_of_two_under_steady_load() -> None:
    machine = Machine(0.5)
    ratios = []

    async def use(batcher: DynamicBatcher[Any, Any], i: int) -> None:
        estimate = batcher.estimate_wait(1)
        before = now()
        await (await batcher.submit(i))
        if estimate > 0.5:
            ratios.append((now() - before - machine.seconds) / estimate)

    async with dynamic_batcher(machine, max_batch_size=16) as batcher:
        assert batcher.estimate_wait(1) == 0.0
        tasks = []
        for i in range(3000):
            tasks.append(asyncio.create_task(use(batcher, i)))
            await asyncio.sleep(0.032 if batcher.stats.queue_depth > 60 else 0.02)
        await asyncio.wait(tasks)
    assert len(ratios) > 1000
    ranked = sorted(ratios)
    assert ranked[len(ranked) // 20] > 0.5
    assert ranked[-len(ranked) // 20] < 2.0


@virtual
async def test_the_estimate_is_a_guess_as_long_as_nothing_was_measured() -> None:
    async with dynamic_batcher(Machine()) as batcher:
        future = await batcher.submit("x")
        await blocked()
        assert batcher.estimate_wait(1) == 1.0
        await future


@virtual
async def test_an_estimate_divides_batches_among_processors_but_not_the_rest_of_one() -> None:
    async with one_by_one(Machine(4.0), max_concurrent_batches=4) as batcher:
        await (await batcher.submit("measured"))
        futures = [batcher.submit_nowait(number) for number in range(4)]
        await asyncio.sleep(1.0)
        assert batcher.estimate_wait(1) == pytest.approx(3.0)
        await results_of(futures)


@virtual
async def test_a_batch_that_was_cancelled_before_it_ran_teaches_nothing() -> None:
    async with one_by_one(Machine(4.0)) as batcher:
        await (await batcher.submit("measured"))
        for _ in range(20):
            futures = [batcher.submit_nowait(number) for number in range(2)]
            for future in futures:
                future.cancel()
            await blocked()
        running = batcher.submit_nowait("x")
        await blocked()
        assert batcher.estimate_wait(1) == pytest.approx(4.0, abs=0.01)
        await running


@virtual
async def test_a_batch_that_is_about_to_leave_takes_more_without_a_wait() -> None:
    async with dynamic_batcher(Machine()) as batcher:
        await (await batcher.submit("measured"))
        future = await batcher.submit("x")
        assert batcher.estimate_wait(1) == 0.0
        await future


# Cancellation and deadlines


@virtual
async def test_a_record_cancelled_while_it_runs_does_not_disturb_the_others() -> None:
    machine = Machine()
    async with dynamic_batcher(machine) as batcher:
        futures = [await batcher.submit(i) for i in range(3)]
        await asyncio.sleep(0.5)
        futures[1].cancel()
        assert batcher.stats.running == 2
        assert await results_of([futures[0], futures[2]]) == ["<0>", "<2>"]
        check_books(batcher)


@virtual
async def test_a_prefetched_record_can_expire_too() -> None:
    machine = Machine(2.0)
    async with dynamic_batcher(machine, max_batch_size=2) as batcher:
        futures = [await batcher.submit(i) for i in range(2)]
        await blocked()
        late = await batcher.submit("late", deadline=now() + 1)
        gone = await batcher.submit("gone")
        gone.cancel()
        futures += [await batcher.submit(i) for i in range(2, 4)]
        results = await results_of([*futures, late])
        assert isinstance(results[-1], Expired)
        check_books(batcher)
    assert machine.batches == [[0, 1], [2, 3]]


@virtual
async def test_a_record_that_expires_as_its_turn_comes_is_not_run() -> None:
    machine = Machine()
    clock = Clock()
    async with DynamicBatcher(machine, max_batch_size=1, prefetch_batches=0, clock=clock) as batcher:
        futures = [await batcher.submit("first"), await batcher.submit("late", deadline=5.0)]
        await blocked()
        clock.now = 6.0
        results = await results_of(futures)
        assert results[0] == "<first>"
        assert isinstance(results[1], Expired)
        assert await (await batcher.submit("next")) == "<next>"
    assert machine.batches == [["first"], ["next"]]


@virtual
async def test_a_record_is_let_go_when_it_has_ended() -> None:
    class Record:
        pass

    machine = Machine()
    async with dynamic_batcher(machine) as batcher:
        records = [Record() for _ in range(3)]
        watch = [weakref.ref(record) for record in records]
        futures = [await batcher.submit(record) for record in records]
        futures[1].cancel()
        del records
        await results_of(futures)
        machine.batches.clear()
        gc.collect()
        assert [reference() for reference in watch] == [None] * 3


# Life


@virtual
async def test_stop_ends_at_its_timeout_even_if_the_function_does_not() -> None:
    async def stubborn(batch: list[int]) -> list[int]:
        while True:
            try:
                await asyncio.sleep(50)
                return batch
            except asyncio.CancelledError:
                continue

    batcher = dynamic_batcher(stubborn, max_batch_size=2)
    await batcher.start()
    futures = [await batcher.submit(i) for i in range(6)]
    await batcher.stop(timeout=3)
    assert now() < 5
    results = await results_of(futures)
    assert all(isinstance(result, Closed) for result in results)
    assert len({id(result) for result in results}) == 6
    assert (batcher.stats.total_failed, batcher.stats.running) == (6, 0)
    # What is left of the old life does not stand in the way of the new one.
    await batcher.start()
    before = now()
    assert await (await batcher.submit(7)) == 7
    assert now() - before == pytest.approx(50.0)
    await asyncio.sleep(200)
    await batcher.stop()
    check_books(batcher)


async def test_stop_does_not_wait_for_a_thread_beyond_its_timeout() -> None:
    go = threading.Event()

    def process(batch: list[int]) -> list[int]:
        go.wait(2 * STILL_S)
        return batch

    batcher = DynamicBatcher(process)
    await batcher.start()
    future = await batcher.submit(1)
    async with asyncio.timeout(STILL_S):
        await batcher.stop(timeout=0.01)
    go.set()
    assert isinstance(future.exception(), Closed)


def test_what_was_being_waited_for_is_forgotten_on_the_next_loop() -> None:
    batcher = dynamic_batcher(Machine(), min_batch_size=2, batch_timeout_s=5.0)

    @virtual
    async def first_life() -> None:
        async with batcher:
            future = await batcher.submit("waits for a second one")
            await blocked()
            future.cancel()

    @virtual
    async def second_life() -> None:
        async with batcher:
            assert await (await batcher.submit("x")) == "<x>"
            assert now() == pytest.approx(6.0)

    first_life()
    second_life()


# Many records


@virtual
async def test_submit_batch_returns_futures_in_order() -> None:
    machine = Machine()
    async with dynamic_batcher(machine) as batcher:
        futures = await batcher.submit_batch(iter("abc"), estimated_cost=[1, 2, 3])
        assert await asyncio.gather(*futures) == ["<a>", "<b>", "<c>"]
        assert batcher.stats.total_batch_cost == 6
        assert await batcher.submit_batch([]) == []
        with pytest.raises(ValueError, match="one cost for each of the 3 records, not 2"):
            await batcher.submit_batch("abc", estimated_cost=[1, 2])
        with pytest.raises(ValueError, match="one cost for each of the 3 records, not 0"):
            await batcher.submit_batch("abc", cost=[])


@virtual
async def test_a_timeout_of_submit_batch_counts_from_its_call() -> None:
    async with one_by_one(Machine(5.0), max_queue_size=1) as batcher:
        with pytest.raises(ValueError, match="either deadline"):
            await batcher.submit_batch("x", deadline=1e6, timeout=1.0)
        with pytest.raises(Expired):
            await batcher.submit_batch("abcd", timeout=7.0)
        assert now() == pytest.approx(7.0, abs=0.01)


@virtual
async def test_submit_batch_takes_back_what_it_submitted_if_one_is_refused() -> None:
    machine = Machine()
    async with dynamic_batcher(machine, target_batch_cost=10, oversize="reject") as batcher:
        with pytest.raises(Oversize):
            await batcher.submit_batch("abc", estimated_cost=[1, 2, 30])
        await blocked()
        assert batcher.stats.total_cancelled == 2
    assert machine.batches == []


@virtual
async def test_submit_batch_queues_nothing_if_one_of_the_costs_is_no_cost() -> None:
    async with dynamic_batcher(Machine()) as batcher:
        with pytest.raises(ValueError, match="estimated_cost must be a finite number >= 0, not nan"):
            await batcher.submit_batch("abc", estimated_cost=[1, 2, math.nan])  # type: ignore[list-item]
        assert batcher.stats.total_submitted == 0


# Statistics


@virtual
async def test_statistics_are_true_in_the_middle_of_a_batch() -> None:
    async with dynamic_batcher(Machine(4.0), max_batch_size=2, prefetch_batches=1) as batcher:
        await asyncio.sleep(1.0)
        futures = [await batcher.submit(i, estimated_cost=i + 1) for i in range(5)]
        await asyncio.sleep(3.0)
        stats = batcher.stats
        assert stats.utilization == pytest.approx(0.75)
        assert (stats.busy_time_s, stats.idle_time_s) == pytest.approx((3.0, 1.0))
        assert (stats.running, stats.running_cost, stats.queue_depth, stats.queue_cost) == (2, 3, 3, 12)
        assert (stats.total_submitted, stats.total_completed, stats.total_batches) == (5, 0, 0)
        await results_of(futures)
        stats = batcher.stats
        assert (stats.total_completed, stats.total_batches, stats.total_batch_cost) == (5, 3, 15)
        assert stats.avg_batch_size == pytest.approx(5 / 3)
        assert stats.avg_batch_cost == pytest.approx(5)
        assert stats.padding_ratio == pytest.approx(1 - 15 / (4 + 8 + 5))
        assert stats.throughput == pytest.approx(5 / 13)
        assert stats.cost_throughput == pytest.approx(15 / 13)
        assert stats.avg_run_s == pytest.approx(4.0)
        assert stats.avg_latency_s == pytest.approx((4 + 4 + 8 + 8 + 12) / 5)
        assert stats.wait_p50_s == pytest.approx(4.0)
        assert stats.run_p99_s == pytest.approx(4.0)
        with pytest.raises(AttributeError):
            stats.total_batches = 0  # type: ignore[misc]


# Arguments


def test_a_queue_must_hold_the_smallest_batch() -> None:
    with pytest.raises(ValueError, match="min_batch_size must be at most max_queue_size=4, not 8"):
        DynamicBatcher(list, min_batch_size=8, max_queue_size=4)


def test_what_is_not_a_function_is_refused() -> None:
    with pytest.raises(TypeError, match="process_fn must be a function or another callable, not 5"):
        DynamicBatcher(5)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="cost_estimator must be a function or another callable, not 'len'"):
        DynamicBatcher(Machine(), cost_estimator="len")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="max_pending must be a whole number >= 1, not 0"):
        DynamicBatcher(Machine()).map([], max_pending=0)


def test_the_documented_parameters_come_first_with_their_defaults() -> None:
    parameters = inspect.signature(DynamicBatcher).parameters
    assert {name: parameters[name].default for name in list(parameters)[1:9]} == {
        "cost_estimator": None,
        "target_batch_cost": 32_000,
        "max_batch_size": 256,
        "min_batch_size": 1,
        "batch_timeout_s": 0.05,
        "max_queue_size": 5_000,
        "prefetch_batches": 2,
        "default_cost": 1,
    }
