"""The order of requests that have no slot yet."""

import asyncio
import random

import pytest

from serve_app.engine import arrivals as module
from serve_app.engine.arrivals import Arrival, Arrivals
from tests.progress import STILL_S

LIMIT_S = STILL_S
FLEX, DEFAULT, PRIORITY = 1, 0, -1


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no request go on since it has waited for long, but where a test wants that."""
    monkeypatch.setattr(module, "MOST_WAIT_S", LIMIT_S)


async def at_once(arrivals: Arrivals, priority: int) -> Arrival:
    """Return the arrival of a request that has no need to wait."""
    entering = arrivals.enter(priority)
    try:
        entering.send(None)
    except StopIteration as stop:
        arrival: Arrival = stop.value
        return arrival
    raise AssertionError("it waits")


async def waiting(arrivals: Arrivals) -> "asyncio.Task[Arrival]":
    """Return the task of a flex request that waits."""
    task = asyncio.ensure_future(arrivals.enter(FLEX))
    await asyncio.sleep(0)
    assert not task.done()
    return task


async def test_a_request_of_another_tier_never_waits() -> None:
    arrivals = Arrivals()
    for priority in (FLEX, DEFAULT, PRIORITY, DEFAULT):
        await at_once(arrivals, priority)


async def test_a_flex_request_waits_for_all_others() -> None:
    arrivals = Arrivals()
    others = [await at_once(arrivals, priority) for priority in (DEFAULT, PRIORITY)]
    flex = await waiting(arrivals)
    others[0].end()
    await asyncio.sleep(0)
    assert not flex.done()
    others[1].end()
    async with asyncio.timeout(LIMIT_S):
        await flex


async def test_flex_requests_go_one_at_a_time_in_their_order() -> None:
    arrivals = Arrivals()
    first = await at_once(arrivals, FLEX)
    behind = [await waiting(arrivals) for _ in range(3)]
    for turn in range(3):
        first.end()
        async with asyncio.timeout(LIMIT_S):
            first = await behind[turn]
        assert [task.done() for task in behind] == [number <= turn for number in range(3)]


async def test_an_end_that_is_told_twice_counts_once() -> None:
    arrivals = Arrivals()
    one, _ = await at_once(arrivals, DEFAULT), await at_once(arrivals, DEFAULT)
    one.end()
    one.end()
    await waiting(arrivals)


async def test_a_flex_request_goes_on_after_a_while_under_any_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_WAIT_S", 0.001)
    arrivals = Arrivals()
    await at_once(arrivals, DEFAULT)
    async with asyncio.timeout(LIMIT_S):
        for _ in range(3):
            await arrivals.enter(FLEX)


async def test_nothing_is_left_behind_by_those_that_are_cancelled() -> None:
    draw = random.Random(0)
    for _ in range(200):
        arrivals = Arrivals()
        held = [await at_once(arrivals, DEFAULT), await at_once(arrivals, PRIORITY)]
        tasks = [await waiting(arrivals) for _ in range(8)]
        gone = draw.sample(tasks, 4)
        for task in gone[:2]:
            task.cancel()
        for arrival in held:
            arrival.end()
        # One of them may have its turn, and not know it yet.
        for task in gone[2:]:
            task.cancel()
        async with asyncio.timeout(LIMIT_S):
            for task in tasks:
                if task not in gone:
                    (await task).end()
            await asyncio.wait(gone)
        assert all(task.cancelled() for task in gone)
        (await at_once(arrivals, FLEX)).end()
