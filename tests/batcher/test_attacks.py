"""Defects that an attack on the batchers found, one test each, named for the behaviour that is right.

`test_random_schedules.py` attacks them again, at random.
"""

import asyncio
import gc
import itertools
import logging
import math
import random
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from batcher import (
    Aborted,
    Closed,
    ContinuousBatcher,
    DynamicBatcher,
    Entry,
    Expired,
    Oversize,
    QueueFull,
    RequestQueue,
    ThreadClient,
    TokenBatcher,
)
from batcher.processing import OUTAGE
from tests.batcher.footprint import footprint
from tests.batcher.lines import count_lines
from tests.batcher.test_continuous import Holders, check_empty
from tests.batcher.test_dynamic import Machine, check_books, results_of
from tests.batcher.virtual import Clock, blocked, now, virtual

WAIT_S = 10.0


def batcher_of(machine: Any, **settings: Any) -> DynamicBatcher[Any, Any]:
    return DynamicBatcher(machine, clock=now, **settings)


async def nothing(record: Any) -> None:
    """Process one record."""


def str_of(given: Any) -> str:
    return given if isinstance(given, str) else "-"


def one_by_one(machine: Any, **settings: Any) -> DynamicBatcher[Any, Any]:
    """A batcher with one record per batch, and nothing between the queue and its start."""
    return batcher_of(machine, max_batch_size=1, prefetch_batches=0, **settings)


# Waiting for space


@virtual
async def test_space_that_an_expired_record_leaves_is_given_to_the_one_that_waits() -> None:
    machine = Machine(held=True)
    batcher = one_by_one(machine, max_queue_size=1)
    await batcher.start()
    await batcher.submit(0)
    await blocked()
    late = await batcher.submit(1, deadline=now() + 0.05)
    outside = asyncio.create_task(batcher.submit(2))
    await asyncio.sleep(0.15)
    assert isinstance(late.exception(), Expired)
    assert outside.done()
    machine.go()
    async with asyncio.timeout(WAIT_S):
        await batcher.stop()
    assert outside.result().result() == "<2>"


@virtual
async def test_a_cancelled_caller_for_space_makes_way_for_those_behind_in_order() -> None:
    machine = Machine(held=True)
    async with one_by_one(machine, max_queue_cost=10) as batcher:
        futures = [await batcher.submit(name, cost=cost) for name, cost in (("a", 1), ("b", 4))]
        tasks = [asyncio.create_task(batcher.submit(name, cost=cost)) for name, cost in (("C", 9), ("d", 6))]
        await blocked()
        assert batcher.stats.outside == 2
        tasks[0].cancel()
        await blocked()
        assert batcher.stats.outside == 0
        late = await batcher.submit("e", cost=0)
        machine.go()
        await results_of([*futures, tasks[1].result(), late])
    assert machine.batches == [["a"], ["b"], ["d"], ["e"]]


@virtual
async def test_a_waiter_for_space_costs_the_same_whatever_tenants_wait() -> None:
    async def lines_per_record(tenants: int) -> float:
        waiting = 2_000
        async with ContinuousBatcher(capacity=1, max_queue_size=10, clock=now) as batcher:

            async def send(tenant: str) -> None:
                async with batcher.slot(1, tenant=tenant, wait=True):
                    await asyncio.sleep(0)

            with count_lines() as lines:
                await asyncio.gather(*(send(f"t{number % tenants}") for number in range(waiting)))
            return lines.count / waiting

    assert 100 < await lines_per_record(2_000) < 1.5 * await lines_per_record(1)


@virtual
async def test_a_large_record_that_waits_for_space_is_served_in_its_turn() -> None:
    machine = Machine(0.01)
    started = []
    async with one_by_one(machine, max_queue_cost=100) as batcher:

        async def send(name: str, cost: int, tenant: str) -> None:
            await (await batcher.submit(name, estimated_cost=cost, tenant=tenant))
            started.append(name)

        tasks = [asyncio.create_task(send("small", 5, "many")) for _ in range(100)]
        await blocked()
        large = asyncio.create_task(send("LARGE", 90, "one"))
        for _ in range(300):
            tasks.append(asyncio.create_task(send("small", 5, "many")))
            await asyncio.sleep(0.01)
            if large.done():
                break
        assert started.index("LARGE") < 30
        await asyncio.gather(*tasks)


@virtual
async def test_priority_counts_while_waiting_for_space_too() -> None:
    machine = Machine(0.01)
    async with one_by_one(machine, max_queue_size=10) as batcher:

        async def send(record: int, priority: int) -> None:
            await (await batcher.submit(record, priority=priority))

        tasks = [asyncio.create_task(send(number, 5)) for number in range(500)]
        await blocked()
        await send(1_000, -5)
        assert len(machine.batches) <= 3
        await asyncio.gather(*tasks)


@virtual
async def test_polling_of_one_tenant_does_not_inflate_the_retry_after_of_another() -> None:
    async with ContinuousBatcher(capacity=1, max_queue_size=4, clock=now) as batcher:
        for _ in range(20):
            async with batcher.slot(1, tenant="a"):
                await asyncio.sleep(0.01)
        holders = Holders(batcher)
        for number in range(5):
            await holders.enter(f"a{number}", 1, tenant="a")

        async def told(tenant: str) -> float:
            with pytest.raises(QueueFull) as caught:
                await batcher.slot(1, tenant=tenant).__aenter__()
            return caught.value.retry_after_s

        for _ in range(1_000):
            await told("a")
            await asyncio.sleep(0.001)
        waits = await told("b"), await told("a")
        await batcher.stop(drain=False, timeout=0)
    assert waits[0] < 0.1
    assert waits[1] <= 75.0


@virtual
async def test_capacity_that_shrinks_counts_for_those_outside_too() -> None:
    async with ContinuousBatcher(capacity=100, max_queue_size=1, clock=now) as batcher:
        holders = Holders(batcher)
        await holders.enter("runs", 100)
        await holders.enter("waits", 5)
        await holders.enter("OUTSIDE", 90, wait=True)
        assert batcher.stats.outside == 1
        batcher.set_capacity(10)
        await blocked()
        assert isinstance(holders.tasks["OUTSIDE"].exception(), Oversize)
        assert batcher.stats.outside == 0
        await holders.leave("runs", "waits")
        check_empty(batcher)


# on_error="split"


def spread_evenly(bad: int) -> set[int]:
    return {256 * number // bad for number in range(bad)}


def at_random(bad: int, seed: int) -> set[int]:
    return set(random.Random(seed).sample(range(256), bad))


def together(bad: int) -> set[int]:
    return set(range(100, 100 + bad)) if bad <= 156 else set(range(bad))


async def split(bad: set[int], on_error: Any = "split") -> tuple[set[int], int]:
    """Return the records of 256 that failed, and the calls it took."""
    calls = 0

    async def process(batch: list[int]) -> list[int]:
        nonlocal calls
        calls += 1
        if bad & set(batch):
            raise ValueError("bad")
        return batch

    async with batcher_of(process, on_error=on_error) as batcher:
        results = await results_of([batcher.submit_nowait(number) for number in range(256)])
        check_books(batcher)
    return {number for number, result in enumerate(results) if isinstance(result, ValueError)}, calls


BAD = {
    f"{name} {count}": records
    for count in (1, 2, 13, 16, 32, 64, 128, 192)
    for name, records in (
        ("evenly", spread_evenly(count)),
        ("together", together(count)),
        *((f"random {seed}", at_random(count, seed)) for seed in range(5)),
    )
}


@virtual
@pytest.mark.parametrize("bad", BAD.values(), ids=BAD)
async def test_a_split_fails_the_bad_records_and_no_other(bad: set[int]) -> None:
    failed, calls = await split(bad)
    assert failed == bad
    assert calls <= min(2 * 256, len(bad) * (math.log2(256 / len(bad)) + 4) + 8)


@virtual
async def test_a_split_gives_up_in_an_outage() -> None:
    failed, calls = await split(set(range(256)))
    assert len(failed) == 256
    assert calls <= OUTAGE + 10


@virtual
async def test_single_runs_each_record_of_a_failed_batch_again() -> None:
    failed, calls = await split({3, 200}, "single")
    assert (failed, calls) == ({3, 200}, 257)


@virtual
async def test_a_record_that_started_in_time_does_not_expire_in_a_split() -> None:
    async def process(batch: list[str]) -> list[str]:
        await asyncio.sleep(1)
        if "bad" in batch:
            raise ValueError
        return batch

    async with batcher_of(process) as batcher:
        futures = [batcher.submit_nowait(name, deadline=now() + 0.5) for name in ("bad", "good", "fine")]
        results = await results_of(futures)
    assert results[1:] == ["good", "fine"]
    assert isinstance(results[0], ValueError)


# batch_timeout_s


class Ticking(Clock):
    """A clock on which each look takes a moment."""

    def __call__(self) -> float:
        self.now += 0.0005
        return self.now


async def test_a_record_in_each_pass_of_the_loop_does_not_hold_up_the_first_batch() -> None:
    clock = Ticking()
    starts: list[float] = []

    async def process(batch: list[int]) -> list[int]:
        starts.append(clock.now)
        return batch

    async with DynamicBatcher(process, batch_timeout_s=0.02, clock=clock) as batcher:
        futures = []
        for number in range(200):
            futures.append(batcher.submit_nowait(number))
            await asyncio.sleep(0)
        await asyncio.gather(*futures)
    assert starts[0] <= 0.03


async def test_records_that_come_and_are_cancelled_do_not_hold_up_a_lone_one() -> None:
    clock = Ticking()

    async def process(batch: list[int]) -> list[int]:
        return batch

    async with DynamicBatcher(process, batch_timeout_s=0.02, clock=clock) as batcher:
        lone = batcher.submit_nowait(1)
        for _ in range(200):
            batcher.submit_nowait(2).cancel()
            await asyncio.sleep(0)
            if lone.done():
                break
        assert clock.now <= 0.03


# Threads


def in_thread(work: Callable[[], Any]) -> tuple[threading.Thread, list[Any]]:
    """Start a thread and return it with what its work will have returned or raised."""
    found: list[Any] = []

    def run() -> None:
        try:
            found.append(work())
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    return thread, found


def test_a_thread_that_waits_for_space_learns_that_the_loop_has_ended() -> None:
    threads: list[tuple[threading.Thread, list[Any]]] = []

    async def main() -> None:
        async def process(batch: list[int]) -> list[int]:
            await asyncio.Event().wait()
            return batch

        batcher = DynamicBatcher(process, max_batch_size=1, max_queue_size=1, prefetch_batches=0)
        await batcher.start()
        client = ThreadClient(batcher)
        for number in range(2):
            await batcher.submit(number)
        threads.append(in_thread(lambda: client.submit(2)))
        threads.append(in_thread(lambda: ThreadClient(batcher).process(3)))
        while batcher.stats.outside < 2:  # noqa: ASYNC110 - a thread can't set an event of this loop
            await asyncio.sleep(0.001)

    asyncio.run(main())
    for thread, found in threads:
        thread.join(WAIT_S)
        assert not thread.is_alive()
        assert isinstance(found[0], Closed)


def test_a_thread_is_told_that_the_loop_does_not_run() -> None:
    async def process(batch: list[int]) -> list[int]:
        return batch

    loop = asyncio.new_event_loop()
    batcher = DynamicBatcher(process)
    loop.run_until_complete(batcher.start())
    client = ThreadClient(batcher)
    thread, found = in_thread(lambda: client.process(1))
    thread.join(WAIT_S)
    assert not thread.is_alive()
    assert isinstance(found[0], Closed)
    loop.close()
    with pytest.raises(Closed, match="closed"):
        client.submit(1)


# Input


HUGE = 10**400
BAD_NUMBERS: list[Any] = [float("nan"), float("inf"), -1, HUGE, 10**5000, "5", [1]]
SUBMITS: list[dict[str, Any]] = [
    *({name: value} for name in ("cost", "estimated_cost") for value in BAD_NUMBERS),
    *({"priority": value} for value in (float("nan"), 1.5, HUGE, "5", None, True)),
    *({"deadline": value} for value in (float("nan"), float("inf"), -math.inf, HUGE, "5", True)),
    *({"timeout": value} for value in BAD_NUMBERS),
    *({"tenant": value} for value in (None, 5, ["a"], b"a")),
]


@pytest.mark.parametrize("options", SUBMITS, ids=lambda options: next(iter(options)))
def test_a_wrong_argument_of_a_submit_is_named_and_nothing_is_queued(options: dict[str, Any]) -> None:
    (name,) = options

    @virtual
    async def scenario() -> None:
        async with batcher_of(Machine()) as batcher, ContinuousBatcher(capacity=9, clock=now) as window:
            for submit in (batcher.submit, batcher.submit_batch):
                given = (
                    {name: [options[name]]} if submit == batcher.submit_batch and "cost" in name else options
                )
                with pytest.raises((ValueError, TypeError), match=name):
                    await submit("x", **given)
            with pytest.raises((ValueError, TypeError), match=name):
                batcher.submit_nowait("x", **options)
            if name != "estimated_cost":
                with pytest.raises((ValueError, TypeError), match=name):
                    window.slot(**{"cost": 1, **options})
                with pytest.raises((ValueError, TypeError), match=name):
                    await window.submit(nothing, "x", **{"cost": 1, **options})
            if name == "cost":
                for tokens in ("prompt_tokens", "max_tokens"):
                    with pytest.raises(ValueError, match=tokens):
                        window.slot(**{"prompt_tokens": 1, "max_tokens": 1, tokens: options[name]})
            assert (batcher.stats.total_submitted, window.stats.total_submitted) == (0, 0)
            assert await (await batcher.submit("fine")) == "<fine>"

    scenario()


SETTINGS: dict[type, dict[str, list[Any]]] = {
    DynamicBatcher: {
        **dict.fromkeys(
            [
                "target_batch_cost",
                "max_batch_size",
                "min_batch_size",
                "max_queue_size",
                "prefetch_batches",
                "default_cost",
                "max_queue_cost",
                "max_concurrent_batches",
                "lookahead",
                "priority_aging_s",
                "batch_timeout_s",
            ],
            BAD_NUMBERS,
        ),
        "tenant_weights": [{"a": value} for value in BAD_NUMBERS] + [5],
        "padded": [5, "no"],
    },
    ContinuousBatcher: {
        **dict.fromkeys(
            ["capacity", "max_running", "places", "max_queue_size", "max_queue_cost", "priority_aging_s"],
            BAD_NUMBERS,
        ),
        "background": [float("nan"), HUGE, "5"],
        "tenant_weights": [{"a": value} for value in BAD_NUMBERS],
    },
    RequestQueue: {
        **dict.fromkeys(["max_size", "max_cost", "priority_aging_s"], BAD_NUMBERS),
        "background": [float("nan"), HUGE, "5"],
    },
}
WRONG = [
    (kind, name, value)
    for kind, names in SETTINGS.items()
    for name, values in names.items()
    for value in values
]


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    WRONG,
    ids=str_of,
)
def test_a_wrong_setting_is_named(kind: Any, name: str, value: Any) -> None:
    least: dict[type, dict[str, Any]] = {
        DynamicBatcher: {"process_fn": list},
        ContinuousBatcher: {"capacity": 1},
        RequestQueue: {"clock": Clock()},
    }
    with pytest.raises((ValueError, TypeError), match=name):
        kind(**{**least[kind], name: value})


@virtual
async def test_other_wrong_numbers_are_named() -> None:
    async with ContinuousBatcher(capacity=10, clock=now) as batcher, batcher.slot(1) as slot:
        calls: list[tuple[str, Callable[[Any], Any]]] = [
            ("capacity", batcher.set_capacity),
            ("max_running", lambda value: batcher.set_capacity(1, value)),
            ("weight", lambda value: batcher.weigh("a", value)),
            ("output_tokens", slot.report),
            ("limit", batcher.observe),
        ]
        for (name, call), value in itertools.product(calls, BAD_NUMBERS):
            with pytest.raises((ValueError, TypeError), match=name):
                call(value)
        with pytest.raises(TypeError, match="tenant"):
            batcher.weigh(["a"], 1.0)  # type: ignore[arg-type]
    for name, wrong in (("cost", HUGE), ("priority", math.nan), ("deadline", math.nan)):
        with pytest.raises(ValueError, match=name):
            Entry(None, **{"cost": 1, name: wrong})  # type: ignore[arg-type]


def test_large_costs_keep_a_queue_fair() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock(), tenant_weights={"a": 1e-6})
    largest = 2**53
    queue.add(Entry("x", largest, tenant="a"))
    queue.add(Entry("y", largest, tenant="a"))
    for number in range(3):
        queue.add(Entry(number, largest, tenant="b"))
    queue.take(max_records=3)
    for tenant in "cd":
        for _ in range(100):
            queue.add(Entry(None, 1, tenant=tenant))
    taken = [entry.tenant for entry in queue.take(max_records=101)]
    assert abs(taken.count("c") - taken.count("d")) <= 1


def test_an_entry_waits_in_one_place() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    entries: list[Entry[Any]] = [Entry(name, 1, deadline=9.0) for name in "abc"]
    entry, other, third = entries
    queue.add(entry)
    with pytest.raises(ValueError, match="waits already"):
        queue.add(entry)
    queue.add(other)
    queue.add(third)
    # Taken out of the middle, and put in again: it is behind the others, and there once.
    assert queue.remove(other)
    queue.add(other)
    assert [each.record for each in queue.take()] == ["a", "c", "b"]
    assert not queue.total


# Eager tasks


@pytest.mark.skipif(sys.version_info < (3, 12), reason="eager tasks came with Python 3.12")
async def test_eager_tasks_do_not_recurse() -> None:
    async def process(batch: list[int]) -> list[int]:
        return batch

    asyncio.get_running_loop().set_task_factory(asyncio.eager_task_factory)  # type: ignore[attr-defined,unused-ignore]
    try:
        async with DynamicBatcher(process, max_batch_size=1, max_concurrent_batches=2) as batcher:
            futures = await batcher.submit_batch(range(3_000))
            async with asyncio.timeout(WAIT_S):
                assert await asyncio.gather(*futures) == list(range(3_000))
    finally:
        asyncio.get_running_loop().set_task_factory(None)


# Figures


@virtual
async def test_the_mean_latency_is_that_of_completed_records() -> None:
    async def process(batch: list[str]) -> list[str]:
        await asyncio.sleep(1)
        if "bad" in batch:
            raise ValueError
        return batch

    async with batcher_of(process, max_batch_size=4, on_error="fail") as batcher:
        await results_of([batcher.submit_nowait("good")])
        await results_of([batcher.submit_nowait("bad") for _ in range(4)])
        assert batcher.stats.avg_latency_s == pytest.approx(1.0)


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


# Other ends


@virtual
@pytest.mark.parametrize("error", [StopIteration(5), asyncio.CancelledError(), SystemExit(1)])
async def test_one_odd_error_for_two_records_leaves_the_good_results(error: BaseException) -> None:
    async def process(batch: list[Any]) -> list[Any]:
        return [error if record == "odd" else record for record in batch]

    async with batcher_of(process) as batcher:
        futures = [batcher.submit_nowait(record) for record in ("odd", "odd", "good")]
        results = await results_of(futures)
        assert [type(result) for result in results] == [Aborted, Aborted, str]
        assert results[0] is not results[1]


@virtual
async def test_a_slot_that_is_released_while_it_waits_ends_the_wait() -> None:
    async with ContinuousBatcher(capacity=10, clock=now) as batcher:
        holders = Holders(batcher)
        await holders.enter("a")
        slot = batcher.slot(10)
        waiting = asyncio.create_task(slot.__aenter__())
        await blocked()
        slot.release()
        await blocked()
        assert isinstance(waiting.exception(), Aborted)
        await holders.leave("a")
        check_empty(batcher)


@virtual
async def test_a_prefetched_record_learns_in_time_that_it_is_late() -> None:
    machine = Machine(10.0)
    async with batcher_of(machine, max_batch_size=2) as batcher:
        futures = [batcher.submit_nowait(number) for number in range(2)]
        await blocked()
        futures += [batcher.submit_nowait(number, deadline=3.0 + number) for number in range(2)]
        with pytest.raises(Expired):
            await futures[2]
        assert now() == pytest.approx(3.0, abs=0.01)
        with pytest.raises(Expired):
            await futures[3]
        assert now() == pytest.approx(4.0, abs=0.01)
        check_books(batcher)


def test_a_batcher_recovers_from_a_loop_that_was_closed_without_a_stop() -> None:
    clock = Clock()
    window = ContinuousBatcher(capacity=1, clock=clock)
    batchers: list[Any] = [
        DynamicBatcher(Machine(5.0), max_batch_size=1, max_queue_size=1, clock=clock),
        window,
    ]

    @virtual
    async def first_life() -> None:
        for batcher in batchers:
            await batcher.start()
        for number in range(2):
            await batchers[0].submit(number)
        asyncio.get_running_loop().outside = asyncio.ensure_future(batchers[0].submit(3))  # type: ignore[attr-defined]
        await Holders(batchers[1]).enter("a", 1)
        await blocked()

    @virtual
    async def second_life() -> None:
        for batcher in batchers:
            await batcher.start()
        assert await (await batchers[0].submit("x")) == "<x>"
        async with batchers[1].slot(1):
            pass
        check_books(batchers[0])
        check_empty(batchers[1])
        for batcher in batchers:
            await batcher.stop()

    first_life()
    second_life()


@virtual
async def test_stop_from_what_it_waits_for_is_refused() -> None:
    async def process(batch: list[int]) -> list[int]:
        await batcher.stop()
        return batch

    async with batcher_of(process, on_error="fail") as batcher:
        with pytest.raises(RuntimeError, match="wait for its own caller"):
            await (await batcher.submit(1))
        assert batcher.is_running
    async with ContinuousBatcher(capacity=1, clock=now) as window:
        async with window.slot(1):
            with pytest.raises(RuntimeError, match="wait for its own caller"):
                await window.stop()
        with pytest.raises(RuntimeError, match="wait for its own caller"):
            await (await window.submit(lambda _: window.stop(), None, 1))


async def test_errors_of_a_stop_that_are_not_awaited_are_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    async def process(batch: list[int]) -> list[int]:
        return batch

    gc.collect()
    batcher = DynamicBatcher(process, min_batch_size=256, batch_timeout_s=60)
    await batcher.start()
    for number in range(100):
        await batcher.submit(number)
    with caplog.at_level(logging.ERROR):
        await batcher.stop(drain=False)
        gc.collect()
        await asyncio.sleep(0)
    assert not [record for record in caplog.records if "DynamicBatcher was stopped" in record.getMessage()]


# What was suspected


class Table:
    """Like a DataFrame: as long as its rows, and iterated by its columns."""

    columns = ("a", "b")

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[str]:
        return iter(self.columns)


@virtual
async def test_a_table_is_not_taken_apart_by_its_columns() -> None:
    async def process(batch: list[int]) -> Any:
        return Table()

    async with batcher_of(process) as batcher:
        results = await results_of([batcher.submit_nowait(number) for number in range(2)])
    assert all("sequence with one result per record, not Table" in str(result) for result in results)


def test_tiers_are_forgotten_with_their_last_entry() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock())
    for priority in range(20_000):
        queue.add(Entry("high", 1, -1))
        queue.add(Entry("low", 1, priority))
        queue.take(max_records=2)
    assert footprint(queue) < 5_000


def test_weights_of_single_tenants_are_bounded_and_can_be_taken_back() -> None:
    queue: RequestQueue[Entry[Any]] = RequestQueue(clock=Clock(), tenant_weights={"a": 3.0})
    for number in range(20_000):
        queue.tenants.weigh(f"t{number}", 2.0)
    assert footprint(queue) < 50_000
    for _ in range(40):
        queue.add(Entry(None, 1, tenant="a"))
        queue.add(Entry(None, 1, tenant="b"))

    def share() -> float:
        taken = [entry.tenant for entry in queue.take(max_records=16)]
        return taken.count("a") / len(taken)

    assert share() == pytest.approx(0.75)
    queue.tenants.weigh("a", 1.0)
    assert share() == pytest.approx(0.5)
    queue.tenants.weigh("a", None)
    assert share() == pytest.approx(0.75)


# Where a newcomer stumbles


@virtual
async def test_a_deadline_may_be_given_in_seconds_from_now() -> None:
    machine = Machine(5.0)
    async with one_by_one(machine) as batcher, ContinuousBatcher(capacity=1, clock=now) as window:
        await asyncio.sleep(100)
        first = await batcher.submit("first", timeout=1.0)
        late = await batcher.submit("late", timeout=1.0)
        with pytest.raises(Expired):
            await late
        assert now() == pytest.approx(101.0, abs=0.01)
        assert await first == "<first>"
        for submit in (batcher.submit, batcher.submit_batch):
            with pytest.raises(ValueError, match="either deadline"):
                await submit("x", deadline=1e6, timeout=1.0)
        for submit_nowait in (batcher.submit_nowait, window.slot):
            with pytest.raises(ValueError, match="either deadline"):
                submit_nowait(1, deadline=1e6, timeout=1.0)


@virtual
async def test_cost_has_one_name_and_an_alias() -> None:
    async with batcher_of(Machine()) as batcher:
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


def test_a_submit_from_another_loop_is_refused() -> None:
    batcher: DynamicBatcher[Any, Any] = DynamicBatcher(Machine())
    window = ContinuousBatcher(capacity=1)

    async def at_home() -> None:
        async with batcher, window:
            found = await asyncio.to_thread(abroad)
            assert all("belongs to another event loop" in str(error) for error in found)
            assert batcher.stats.total_submitted == window.stats.total_submitted == 0

    def abroad() -> list[BaseException]:
        async def submit() -> list[BaseException]:
            found = await asyncio.gather(
                batcher.submit(1), window.slot(1).__aenter__(), batcher.stop(), return_exceptions=True
            )
            return [error for error in found if isinstance(error, BaseException)]

        errors = asyncio.run(submit())
        with pytest.raises(RuntimeError, match="another event loop") as caught:
            batcher.submit_nowait(1)
        return [*errors, caught.value]

    with asyncio.Runner() as runner:
        runner.run(at_home())


def test_a_loop_is_told_from_another_one_of_its_thread_and_may_change_its_thread() -> None:
    batcher: DynamicBatcher[Any, Any] = DynamicBatcher(Machine(0.0))
    window = ContinuousBatcher(capacity=1)

    async def start() -> None:
        await batcher.start()
        await window.start()

    async def submit() -> Any:
        async with window.slot(1):
            return await batcher.submit_nowait(1)

    async def stop() -> None:
        await batcher.stop()
        await window.stop()

    home, abroad = asyncio.new_event_loop(), asyncio.new_event_loop()
    home.run_until_complete(start())
    with pytest.raises(RuntimeError, match="another event loop"):
        abroad.run_until_complete(submit())
    with ThreadPoolExecutor(1) as thread:
        assert thread.submit(home.run_until_complete, submit()).result() == home.run_until_complete(submit())
    home.run_until_complete(stop())
    home.close()
    abroad.close()


@virtual
async def test_an_error_in_the_block_is_not_held_up_by_what_waits() -> None:
    machine = Machine(100.0)
    batcher = one_by_one(machine)

    async def block() -> None:
        async with batcher:
            futures.extend(await batcher.submit_batch(range(50)))
            await blocked()
            raise KeyError("mine")

    futures: list[Any] = []
    with pytest.raises(KeyError):
        await block()
    assert now() == pytest.approx(100.0, abs=0.01)
    assert sum(isinstance(future.exception(), Closed) for future in futures) == 49


def test_a_queue_must_hold_the_smallest_batch() -> None:
    with pytest.raises(ValueError, match="min_batch_size must be at most max_queue_size=4, not 8"):
        DynamicBatcher(list, min_batch_size=8, max_queue_size=4)
