"""Large bodies are looked into beside the event loop."""

import asyncio
import threading

import pytest

from serve_app.ingress.large_bodies import LARGE_BYTES, look

LIMIT_S = 10.0


async def test_a_small_body_is_looked_into_at_once() -> None:
    assert await look(LARGE_BYTES, threading.get_ident) == threading.get_ident()


async def test_large_bodies_take_turns_and_leave_the_loop_alone() -> None:
    free, entered = threading.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    inside: list[int] = []
    most = 0

    def call() -> int:
        nonlocal most
        inside.append(1)
        most = max(most, len(inside))
        loop.call_soon_threadsafe(entered.set)
        assert free.wait(LIMIT_S)
        inside.pop()
        return threading.get_ident()

    async with asyncio.timeout(LIMIT_S):
        calls = [asyncio.ensure_future(look(LARGE_BYTES + 1, call)) for _ in range(3)]
        # The loop turns while the first one is looked into.
        await entered.wait()
        free.set()
        assert threading.get_ident() not in await asyncio.gather(*calls)
    assert most == 1


async def test_an_error_of_the_look_is_the_caller_s() -> None:
    with pytest.raises(ZeroDivisionError):
        await look(LARGE_BYTES + 1, lambda: 1 // 0)
