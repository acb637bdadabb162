"""Large bodies are looked into beside the event loop."""

import asyncio
import json
import threading
import weakref

import pytest

from serve_app.ingress.large_bodies import LARGE_BYTES, look, weight
from tests.progress import STILL_S

LIMIT_S = STILL_S


async def test_a_small_body_is_looked_into_at_once() -> None:
    assert await look(LARGE_BYTES, threading.get_ident) == threading.get_ident()


async def test_a_body_of_many_values_is_a_large_one() -> None:
    body = b'{"messages": [' + b"[{}]," * 5_000 + b"[{}]]}"
    assert len(body) < LARGE_BYTES / 10
    assert await look(weight(body), threading.get_ident) != threading.get_ident()


@pytest.mark.parametrize("text", ["a" * LARGE_BYTES, "Well, it is so, as it was. " * 1_000])
def test_a_text_weighs_about_as_much_as_its_bytes(text: str) -> None:
    body = json.dumps({"prompt": text}).encode()
    assert len(body) <= weight(body) < 20 * len(body)


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


async def test_a_body_whose_client_leaves_is_not_kept_until_its_turn_comes() -> None:
    free, entered = threading.Event(), threading.Event()

    class Body:
        """A body whose end can be seen."""

        def look(self) -> None:
            raise AssertionError

    def hold() -> None:
        entered.set()
        assert free.wait(LIMIT_S)

    async with asyncio.timeout(LIMIT_S):
        first = asyncio.ensure_future(look(LARGE_BYTES + 1, hold))
        assert await asyncio.to_thread(entered.wait, LIMIT_S)
        body = Body()
        kept = weakref.ref(body)
        call = asyncio.ensure_future(look(LARGE_BYTES + 1, body.look))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call})
        del body, call
        try:
            assert kept() is None
        finally:
            free.set()
            await first


async def test_an_error_of_the_look_is_the_caller_s() -> None:
    with pytest.raises(ZeroDivisionError):
        await look(LARGE_BYTES + 1, lambda: 1 // 0)
