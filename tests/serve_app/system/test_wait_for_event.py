"""Waits that have a limit."""

import asyncio

import pytest

from serve_app.system.cancellation import wait_for_event


async def test_an_event_that_comes_ends_the_wait() -> None:
    event = asyncio.Event()
    waiting = asyncio.create_task(wait_for_event(event, 60))
    await asyncio.sleep(0)
    event.set()
    assert await waiting is True


async def test_an_event_that_has_come_is_not_waited_for() -> None:
    event = asyncio.Event()
    event.set()
    assert await wait_for_event(event, 60) is True


async def test_the_wait_ends_at_its_limit() -> None:
    assert await wait_for_event(asyncio.Event(), 0.01) is False


@pytest.mark.parametrize("turns", range(4))
async def test_a_cancellation_is_not_lost_to_the_event(turns: int) -> None:
    event = asyncio.Event()

    async def wait_on() -> None:
        while True:
            await wait_for_event(event, 60)
            event.clear()

    waiting = asyncio.create_task(wait_on())
    await asyncio.sleep(0)
    event.set()
    for _ in range(turns):
        await asyncio.sleep(0)
    waiting.cancel()
    ended, going_on = await asyncio.wait([waiting], timeout=1)
    for task in going_on:
        task.cancel()
    assert ended
    assert waiting.cancelled()
