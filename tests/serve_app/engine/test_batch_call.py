"""Calls that carry a list of records: order, admission, and errors of single records."""

import asyncio
import gc
from collections.abc import AsyncIterator
from typing import Any

import pytest

from batcher import DynamicBatcher
from serve_app.api.errors import RequestError
from serve_app.api.protocol import PromptError
from serve_app.api.scheduling import DEFAULT_SCHEDULING, Scheduling
from serve_app.engine.batch_call import RECORDS_PER_TURN, BatchCall, run_records
from tests.progress import STILL_S

LIMIT_S = STILL_S


class Model:
    """A function that the test may hold up.

    Attributes:
        seen: The batches that it was given.
        started: Set once it runs.
        go: It waits for this.
    """

    def __init__(self) -> None:
        self.seen: list[list[Any]] = []
        self.started = asyncio.Event()
        self.go = asyncio.Event()
        self.go.set()

    async def process(self, batch: list[Any]) -> list[Any]:
        self.seen.append(batch)
        self.started.set()
        await self.go.wait()
        return [KeyError("bad") if record == "bad" else f"<{record}>" for record in batch]

    @property
    def records(self) -> list[Any]:
        return [record for batch in self.seen for record in batch]


@pytest.fixture
def model() -> Model:
    return Model()


@pytest.fixture
async def batcher(model: Model) -> AsyncIterator[DynamicBatcher[Any, Any]]:
    async with DynamicBatcher(
        model.process, max_batch_size=4, max_queue_size=4, prefetch_batches=0
    ) as batcher:
        yield batcher
        model.go.set()


async def run(
    batcher: DynamicBatcher[Any, Any],
    records: list[Any],
    scheduling: Scheduling = DEFAULT_SCHEDULING,
    partial: bool = False,
) -> list[Any]:
    """Return the result of each record, or the type of its error."""
    call = BatchCall("records", partial=partial)
    async with asyncio.timeout(LIMIT_S):
        tickets = await run_records(batcher, records, scheduling, call)
    failed = {error.index: error.type for error in call.errors or ()}
    return [failed[index] if ticket is None else ticket.result() for index, ticket in enumerate(tickets)]


async def settle() -> None:
    """Let every task run until it waits for something that only the test can bring about."""
    for _ in range(20):
        await asyncio.sleep(0)


async def hold_up(model: Model, batcher: DynamicBatcher[Any, Any], waiting: int) -> "asyncio.Future[Any]":
    """Keep the function busy and `waiting` records in the queue."""
    model.go.clear()
    first = asyncio.ensure_future(run(batcher, ["busy"]))
    await asyncio.wait_for(model.started.wait(), LIMIT_S)
    for index in range(waiting):
        batcher.submit_nowait(f"w{index}")
    return first


async def test_results_are_in_the_order_of_the_records(batcher: DynamicBatcher[Any, Any]) -> None:
    count = 2 * RECORDS_PER_TURN + 3
    assert await run(batcher, list(range(count))) == [f"<{n}>" for n in range(count)]
    assert batcher.stats.avg_batch_size > 1


async def test_a_list_longer_than_the_queue_waits_for_room_behind_its_first_record(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    busy = await hold_up(model, batcher, 3)
    call = asyncio.ensure_future(run(batcher, list(range(20))))
    await settle()
    assert batcher.stats.outside == 1
    assert not call.done()
    model.go.set()
    assert await call == [f"<{n}>" for n in range(20)]
    await busy


async def test_the_call_is_refused_when_its_first_record_finds_no_room(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    busy = await hold_up(model, batcher, 4)
    for partial in (False, True):
        with pytest.raises(RequestError) as caught:
            await run(batcher, ["x", "y"], partial=partial)
        assert (caught.value.status, caught.value.param) == (429, "records[0]")
        assert caught.value.retry_after_s is not None
    model.go.set()
    await busy
    assert "x" not in model.records


async def test_a_record_that_fails_is_named_with_its_error(batcher: DynamicBatcher[Any, Any]) -> None:
    with pytest.raises(RequestError) as caught:
        await run(batcher, ["a", "b", "bad"])
    error = caught.value
    assert (error.status, error.type, error.param) == (422, "processing_error", "records[2]")
    assert error.message == "records[2]: KeyError: 'bad'"


async def test_the_rest_of_a_call_that_failed_is_not_run(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    with pytest.raises(RequestError):
        await run(batcher, ["bad", *range(1000)])
    assert len(model.records) < 100
    assert batcher.stats.queue_depth == 0


async def test_with_partial_a_record_fails_alone(batcher: DynamicBatcher[Any, Any]) -> None:
    outcomes = await run(batcher, ["bad", "a", "bad", "b"], partial=True)
    failed = "processing_error"
    assert outcomes == [failed, "<a>", failed, "<b>"]


async def test_a_record_without_a_cost_fails_alone_too(model: Model) -> None:
    def cost(record: Any) -> int:
        if not isinstance(record, str):
            raise TypeError("no text")
        return len(record)

    async with DynamicBatcher(model.process, cost_estimator=cost) as batcher:
        outcomes = await run(batcher, [5, "a", None], partial=True)
        failed = "processing_error"
        assert outcomes == [failed, "<a>", failed]
        with pytest.raises(RequestError, match=r"records\[1\]: TypeError: no text"):
            await run(batcher, ["a", 5])


async def test_nothing_but_bad_records_is_no_hang(model: Model) -> None:
    def cost(record: Any) -> int:
        raise TypeError("no")

    async with DynamicBatcher(model.process, cost_estimator=cost) as batcher:
        assert len(await run(batcher, [1, 2], partial=True)) == 2


async def test_a_record_that_can_not_start_in_time_is_not_run(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    busy = await hold_up(model, batcher, 0)
    scheduling = Scheduling(queue_timeout_s=0.01)
    with pytest.raises(RequestError) as caught:
        await run(batcher, ["late"], scheduling)
    assert (caught.value.status, caught.value.type) == (408, "timeout_error")
    assert await run(batcher, ["late"] * 6, scheduling, partial=True) == ["timeout_error"] * 6
    model.go.set()
    await busy
    assert "late" not in model.records


async def test_records_go_in_the_order_of_their_class_and_share_by_tenant(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    busy = await hold_up(model, batcher, 0)
    calls = [
        asyncio.ensure_future(run(batcher, [name], scheduling))
        for name, scheduling in [
            ("flex", Scheduling(1)),
            ("b", Scheduling(0, "b")),
            ("first", Scheduling(-1)),
        ]
    ]
    await settle()
    assert batcher.stats.queue_depth == 3
    model.go.set()
    await asyncio.gather(busy, *calls)
    assert model.records == ["busy", "first", "b", "flex"]


async def test_a_caller_that_leaves_takes_its_records_along(
    model: Model, batcher: DynamicBatcher[Any, Any]
) -> None:
    busy = await hold_up(model, batcher, 0)
    call = asyncio.ensure_future(run(batcher, ["gone"] * 10))
    await settle()
    assert batcher.stats.queue_depth == 4
    call.cancel()
    await asyncio.wait([call])
    assert batcher.stats.queue_depth == 0
    model.go.set()
    await busy
    assert "gone" not in model.records


async def test_a_function_that_breaks_its_contract_is_the_server_s_fault() -> None:
    async def process(batch: list[Any]) -> list[Any]:
        return []

    async with DynamicBatcher(process) as batcher:
        for partial in (False, True):
            with pytest.raises(RequestError) as caught:
                await run(batcher, ["a"], partial=partial)
            assert (caught.value.status, caught.value.type) == (500, "internal_error")


async def test_a_batcher_that_stops_sends_the_caller_elsewhere(batcher: DynamicBatcher[Any, Any]) -> None:
    await batcher.stop()
    with pytest.raises(RequestError) as caught:
        await run(batcher, ["a"], partial=True)
    assert caught.value.status == 503


async def test_no_error_is_left_to_the_event_loop_to_report(batcher: DynamicBatcher[Any, Any]) -> None:
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(context))
    with pytest.raises(RequestError):
        await run(batcher, ["bad"] * 4)
    gc.collect()
    await asyncio.sleep(0)
    assert told == []


def test_a_record_that_fails_before_it_is_queued_leaves_its_turn_to_the_next() -> None:
    call = BatchCall("records", partial=True)
    assert not call.wait(0)
    call.fail(0, RequestError(422, "processing_error", "no cost"))
    assert not call.wait(1)
    assert call.wait(2)


class CountedCall(BatchCall):
    """Counts how often its errors are put in order.

    Attributes:
        asked: How often.
    """

    asked = 0

    @property
    def errors(self) -> list[PromptError] | None:
        self.asked += 1
        return super().errors


async def test_the_errors_of_a_call_are_put_in_order_once_however_many_records_follow(model: Model) -> None:
    async with DynamicBatcher(model.process) as batcher:
        call = CountedCall("records", partial=True)
        await run_records(batcher, ["bad", *["a"] * 20 * RECORDS_PER_TURN], DEFAULT_SCHEDULING, call)
    assert call.asked < 10
    assert [error.index for error in call.errors or ()] == [0]


async def test_other_tasks_get_their_turn_while_records_fail(model: Model) -> None:
    turns = 0

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    async with DynamicBatcher(model.process, cost_estimator=len) as batcher:
        counting = asyncio.ensure_future(count())
        await run(batcher, [0] * 10 * RECORDS_PER_TURN, partial=True)
        counting.cancel()
    assert turns >= 10
