"""A cancellation of a task, and one of the future that it awaits."""

import asyncio

from serve_app.system import cancellation
from tests.progress import STILL_S

LIMIT_S = STILL_S


async def is_own_by(future: "asyncio.Future[None]") -> bool:
    """Wait for a cancellation; return whether it is one of this task."""
    try:
        await future
    except asyncio.CancelledError:
        return cancellation.is_own()
    raise AssertionError("nothing was cancelled")


async def test_a_cancelled_future_is_not_a_cancelled_task() -> None:
    future = asyncio.get_running_loop().create_future()
    waits = asyncio.ensure_future(is_own_by(future))
    await asyncio.sleep(0)
    future.cancel()
    assert await asyncio.wait_for(waits, LIMIT_S) is False


async def test_a_cancelled_task_is_recognised() -> None:
    waits = asyncio.ensure_future(is_own_by(asyncio.get_running_loop().create_future()))
    await asyncio.sleep(0)
    waits.cancel()
    assert await asyncio.wait_for(waits, LIMIT_S) is True
