"""The calls of `process_fn`: errors and the records they are due to, results, and kinds of functions."""

import asyncio
import contextvars
import functools
import gc
import math
import random
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest

from batcher import Aborted, DynamicBatcher
from batcher.processing import OUTAGE
from tests.batcher.helpers import check_books, dynamic_batcher, refusing_bad, results_of
from tests.batcher.virtual import now, until, virtual
from tests.progress import STILL_S

# Errors


@virtual
async def test_a_poison_record_fails_alone() -> None:
    calls = []

    async def process(batch: list[int]) -> list[int]:
        calls.append(list(batch))
        if 13 in batch:
            raise KeyError("poison")
        return batch

    async with dynamic_batcher(process) as batcher:
        futures = [await batcher.submit(i) for i in range(64)]
        results = await results_of(futures)
        assert [i for i, result in enumerate(results) if isinstance(result, KeyError)] == [13]
        assert [result for result in results if not isinstance(result, KeyError)] == [
            i for i in range(64) if i != 13
        ]
        assert (batcher.stats.total_completed, batcher.stats.total_failed) == (63, 1)
    assert len(calls) <= 2 * 6 + 1


@virtual
async def test_on_error_fail_fails_the_whole_batch_with_an_error_for_each() -> None:
    calls = []

    async def process(batch: list[int]) -> list[int]:
        calls.append(len(batch))
        raise KeyError("x")

    async with dynamic_batcher(process, on_error="fail") as batcher:
        results = await results_of([await batcher.submit(i) for i in range(3)])
    assert calls == [3]
    assert [repr(result) for result in results] == ["KeyError('x')"] * 3
    assert len({id(result) for result in results}) == 3


@virtual
async def test_a_record_cancelled_between_the_parts_of_a_batch_is_left_out() -> None:
    calls = []

    async def process(batch: list[int]) -> list[int]:
        calls.append(list(batch))
        if len(batch) == 4:
            futures[3].cancel()
            raise ValueError
        return batch

    async with dynamic_batcher(process) as batcher:
        futures = [await batcher.submit(i) for i in range(4)]
        assert await results_of(futures[:3]) == [0, 1, 2]
        check_books(batcher)
    assert calls == [[0, 1, 2, 3], [0, 1], [2]]


@virtual
async def test_a_result_may_be_an_exception() -> None:
    shared = ValueError("shared")

    async def process(batch: list[Any]) -> list[Any]:
        odd = {"stop": StopIteration(), "cancel": asyncio.CancelledError(), "shared": shared}
        return [odd.get(record, record) for record in batch]

    async with dynamic_batcher(process) as batcher:
        futures = [await batcher.submit(record) for record in ("fine", "shared", "shared", "stop", "cancel")]
        results = await results_of(futures)
        assert (batcher.stats.total_completed, batcher.stats.total_failed) == (1, 4)
    assert results[0] == "fine"
    assert [str(result) for result in results[1:3]] == ["shared", "shared"]
    assert results[1] is not results[2]
    assert all(isinstance(result, RuntimeError) for result in results[3:])


@virtual
async def test_an_error_that_is_raised_by_several_calls_is_copied_too() -> None:
    kept = ValueError("kept")

    async def process(batch: list[str]) -> list[str]:
        if "bad" in batch:
            raise kept
        return batch

    async with dynamic_batcher(process) as batcher:
        futures = [batcher.submit_nowait(record) for record in ("bad", "good", "bad")]
        first, good, second = await results_of(futures)
    assert (str(first), good, str(second)) == ("kept", "good", "kept")
    assert first is not second


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (None, "must return a sequence with one result per record, not NoneType"),
        ("ab", "not str"),
        ({"a": 1, "b": 2}, "not dict"),
        ({1, 2}, "not set"),
        (5, "not int"),
        ([1], "returned 1 results for a batch of 2 records"),
        ((1, 2, 3), "returned 3 results for a batch of 2 records"),
    ],
)
def test_a_wrong_answer_fails_its_batch_and_no_other(answer: Any, message: str) -> None:
    calls = []

    async def process(batch: list[str]) -> Any:
        calls.append(batch)
        return answer if "bad" in batch else batch

    @virtual
    async def scenario() -> None:
        async with dynamic_batcher(process) as batcher:
            results = await results_of([await batcher.submit(record) for record in ("bad", "x")])
            for result in results:
                assert isinstance(result, ValueError)
                assert message in str(result)
            assert results[0] is not results[1]
            assert len(calls) == 1
            assert await (await batcher.submit("fine")) == "fine"

    scenario()


@virtual
async def test_the_rows_of_an_array_are_results() -> None:
    class Rows:
        def __len__(self) -> int:
            return 2

        def __iter__(self) -> Iterator[str]:
            return iter(("row 0", "row 1"))

    async def process(batch: list[str]) -> Any:
        return Rows()

    async with dynamic_batcher(process) as batcher:
        assert await results_of([await batcher.submit(i) for i in range(2)]) == ["row 0", "row 1"]


def test_an_exit_of_the_process_is_passed_on_and_still_ends_every_future() -> None:
    futures: list[asyncio.Future[Any]] = []

    async def process(batch: list[int]) -> list[int]:
        raise KeyboardInterrupt

    async def main() -> None:
        batcher = DynamicBatcher(process)
        await batcher.start()
        futures.extend([await batcher.submit(i) for i in range(3)])
        await asyncio.Event().wait()

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(main())
    assert all(isinstance(future.exception(), Aborted) for future in futures)


@virtual
@pytest.mark.parametrize("error", [StopIteration(5), asyncio.CancelledError(), SystemExit(1)])
async def test_one_odd_error_for_two_records_leaves_the_good_results(error: BaseException) -> None:
    async def process(batch: list[Any]) -> list[Any]:
        return [error if record == "odd" else record for record in batch]

    async with dynamic_batcher(process) as batcher:
        futures = [batcher.submit_nowait(record) for record in ("odd", "odd", "good")]
        results = await results_of(futures)
        assert [type(result) for result in results] == [Aborted, Aborted, str]
        assert results[0] is not results[1]


class Unprintable(BaseException):
    def __repr__(self) -> str:
        raise RuntimeError("no text")


@virtual
async def test_an_error_without_a_text_for_one_record_leaves_the_good_results() -> None:
    async def process(batch: list[Any]) -> list[Any]:
        return [Unprintable() if record == "odd" else record for record in batch]

    async with dynamic_batcher(process) as batcher:
        results = await results_of([batcher.submit_nowait(record) for record in ("a", "odd", "b")])
        assert [type(result) for result in results] == [str, Aborted, str]
        assert (batcher.stats.total_completed, batcher.stats.total_failed) == (2, 1)


@virtual
@pytest.mark.parametrize("error", [Unprintable(), GeneratorExit()])
async def test_whatever_a_function_raises_ends_its_records(error: BaseException) -> None:
    async def process(batch: list[int]) -> list[int]:
        raise error

    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: reported.append(context))
    async with dynamic_batcher(process) as batcher:
        results = await results_of([batcher.submit_nowait(number) for number in range(3)])
        assert [type(result) for result in results] == [Aborted] * 3
        assert batcher.stats.total_failed == 3
        check_books(batcher)


class Activations:
    """Memory of a forward pass."""


@pytest.mark.parametrize("in_thread", [False, True])
async def test_a_part_of_a_batch_runs_when_the_memory_of_the_failed_call_is_free(
    in_thread: bool, little_garbage: None
) -> None:
    passes: list[weakref.ref[Activations]] = []
    alive: list[int] = []

    def process(batch: list[str]) -> list[str]:
        alive.append(sum(each() is not None for each in passes))
        memory = Activations()
        passes.append(weakref.ref(memory))
        if len(batch) > 1:
            raise MemoryError
        return batch

    async def process_here(batch: list[str]) -> list[str]:
        return process(batch)

    gc.disable()
    try:
        async with (
            DynamicBatcher(process if in_thread else process_here) as batcher,
            asyncio.timeout(STILL_S),
        ):
            assert await results_of(await batcher.submit_batch("abcd")) == [*"abcd"]
    finally:
        gc.enable()
    assert len(alive) > 4
    assert not any(alive)


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

    async with dynamic_batcher(process) as batcher:
        results = await results_of([batcher.submit_nowait(number) for number in range(2)])
    assert all("sequence with one result per record, not Table" in str(result) for result in results)


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

    async with dynamic_batcher(process, on_error=on_error) as batcher:
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
    assert calls <= 2 * len(bad) * (math.log2(256 / len(bad)) + 1)


@virtual
async def test_a_split_gives_up_in_an_outage() -> None:
    failed, calls = await split(set(range(256)))
    assert len(failed) == 256
    assert calls <= 2 * OUTAGE + 10


@virtual
async def test_single_runs_each_record_of_a_failed_batch_again() -> None:
    failed, calls = await split({3, 200}, "single")
    assert (failed, calls) == ({3, 200}, 257)


@virtual
async def test_a_record_that_started_in_time_does_not_expire_in_a_split() -> None:
    async with dynamic_batcher(refusing_bad) as batcher:
        futures = [batcher.submit_nowait(name, deadline=now() + 0.5) for name in ("bad", "good", "fine")]
        results = await results_of(futures)
    assert results[1:] == ["good", "fine"]
    assert isinstance(results[0], ValueError)


# Functions that are not asynchronous


async def test_a_synchronous_function_runs_in_a_thread() -> None:
    loop_thread = threading.get_ident()
    threads = set()

    def process(batch: list[int]) -> list[int]:
        threads.add(threading.get_ident())
        return [2 * record for record in batch]

    async with DynamicBatcher(process, max_batch_size=2) as batcher:
        async with asyncio.timeout(STILL_S):
            assert await results_of([await batcher.submit(i) for i in range(6)]) == [0, 2, 4, 6, 8, 10]
    assert loop_thread not in threads
    assert len(threads) == 1


async def test_the_event_loop_goes_on_while_a_synchronous_function_runs() -> None:
    go = threading.Event()

    def process(batch: list[int]) -> list[int]:
        assert go.wait(STILL_S)
        return batch

    async with DynamicBatcher(process) as batcher:
        future = await batcher.submit(1)
        await until(lambda: batcher.stats.running == 1)
        go.set()
        async with asyncio.timeout(STILL_S):
            assert await future == 1


@pytest.mark.parametrize("error", [KeyError("x"), StopIteration(), SystemExit(1)])
async def test_an_error_in_a_thread_reaches_its_record(error: BaseException) -> None:
    def process(batch: list[int]) -> list[int]:
        raise error

    async with DynamicBatcher(process) as batcher:
        future = await batcher.submit(1)
        async with asyncio.timeout(STILL_S):
            (result,) = await results_of([future])
        assert isinstance(result, KeyError if isinstance(error, KeyError) else RuntimeError)
        assert batcher.is_running


async def test_what_a_function_is_decides_how_it_is_called() -> None:
    async def double(factor: int, batch: list[int]) -> list[int]:
        return [factor * record for record in batch]

    class Model:
        async def process(self, batch: list[int]) -> list[int]:
            return [2 * record for record in batch]

        async def __call__(self, batch: list[int]) -> list[int]:
            return await self.process(batch)

    model = Model()
    functions: list[Any] = [
        functools.partial(double, 2),
        model,
        model.process,
        lambda batch: double(2, batch),
        lambda batch: [2 * record for record in batch],
    ]
    for function in functions:
        async with DynamicBatcher(function) as batcher, asyncio.timeout(STILL_S):
            assert await (await batcher.submit(21)) == 42


async def test_the_context_of_a_caller_does_not_leak_into_the_function() -> None:
    variable = contextvars.ContextVar("variable", default="nothing")
    variable.set("of the start")
    seen = []

    async def process(batch: list[int]) -> list[int]:
        seen.append(variable.get())
        variable.set("inside")
        return batch

    def process_in_thread(batch: list[int]) -> list[int]:
        seen.append(variable.get())
        return batch

    async def caller(batcher: DynamicBatcher[int, int]) -> None:
        variable.set("caller")
        await (await batcher.submit(1))

    for function in (process, process_in_thread):
        async with DynamicBatcher[int, int](function) as batcher, asyncio.timeout(STILL_S):
            for _ in range(2):
                await asyncio.create_task(caller(batcher))
    assert seen == ["of the start"] * 4
