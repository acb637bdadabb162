"""Slots of adapters, under any order of requests."""

import asyncio
from contextlib import AsyncExitStack

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.engine.adapter_slots import AdapterSlots
from tests.progress import STILL_S

LIMIT_S = STILL_S


class Request:
    """A request that holds an adapter until it is told to end."""

    def __init__(self, slots: AdapterSlots, adapter: str) -> None:
        self.adapter = adapter
        self._entered = False
        self._end = asyncio.Event()
        self.task = asyncio.ensure_future(self._run(slots))

    async def _run(self, slots: AdapterSlots) -> None:
        async with slots.using(self.adapter):
            self._entered = True
            await self._end.wait()

    def entered(self) -> bool:
        return self._entered

    async def end(self) -> None:
        self._end.set()
        async with asyncio.timeout(LIMIT_S):
            await self.task


async def settle() -> None:
    for _ in range(10):
        await asyncio.sleep(0)


async def ask(slots: AdapterSlots, *adapters: str) -> list[Request]:
    requests = [Request(slots, adapter) for adapter in adapters]
    await settle()
    return requests


async def test_a_free_slot_is_taken_at_once_and_kept() -> None:
    slots = AdapterSlots(2)
    a, b = await ask(slots, "a", "b")
    assert a.entered()
    assert b.entered()
    await a.end()
    await b.end()
    assert slots.resident == ["a", "b"]


async def test_the_adapter_that_was_used_least_recently_gives_its_slot() -> None:
    slots = AdapterSlots(2)
    for adapter in ("a", "b", "a", "c"):
        async with slots.using(adapter):
            pass
    assert slots.resident == ["a", "c"]


async def test_a_flood_on_the_adapters_that_are_loaded_does_not_keep_another_out() -> None:
    slots = AdapterSlots(2)
    first, _, waiting = await ask(slots, "a", "b", "c")
    assert not waiting.entered()
    more_a, more_b = await ask(slots, "a", "b")
    # a drains, b goes on.
    assert (more_a.entered(), more_b.entered()) == (False, True)
    await first.end()
    await settle()
    assert waiting.entered()
    assert slots.resident == ["b", "c"]
    assert not more_a.entered()


async def test_a_request_that_leaves_the_queue_lets_those_behind_it_in() -> None:
    slots = AdapterSlots(1)
    first, gone, behind = await ask(slots, "a", "b", "a")
    assert not behind.entered()
    gone.task.cancel()
    await settle()
    assert behind.entered()
    await first.end()
    await behind.end()
    assert slots.waiting == 0


async def test_a_request_that_leaves_the_queue_as_its_slot_gets_free_is_cancelled() -> None:
    slots = AdapterSlots(1)
    async with slots.using("a"):
        (gone,) = await ask(slots, "b")
        gone.task.cancel()
    # The slot is given on before the task of the request runs again.
    with pytest.raises(asyncio.CancelledError):
        await gone.task
    (next_one,) = await ask(slots, "c")
    assert next_one.entered()
    assert slots.waiting == 0
    await next_one.end()


async def test_a_pinned_adapter_keeps_its_slot() -> None:
    slots = AdapterSlots(2)
    slots.pin("p")
    for adapter in ("a", "b", "c"):
        async with slots.using(adapter):
            assert set(slots.resident) == {"p", adapter}
    slots.remove("p")
    assert slots.resident == ["c"]


async def test_the_end_of_the_last_request_is_told() -> None:
    slots = AdapterSlots(1)
    (request,) = await ask(slots, "a")
    leaving = asyncio.ensure_future(slots.left("a"))
    await settle()
    assert not leaving.done()
    await request.end()
    async with asyncio.timeout(LIMIT_S):
        await leaving


@settings(deadline=None, max_examples=100)
@given(
    st.integers(2, 3),
    st.lists(st.tuples(st.sampled_from(["ask", "end", "cancel"]), st.sampled_from("abcde")), max_size=60),
)
def test_no_more_adapters_than_slots_have_requests_and_all_are_served(
    count: int, actions: list[tuple[str, str]]
) -> None:
    async def run() -> None:
        slots = AdapterSlots(count)
        slots.pin("e")
        requests: list[Request] = []
        for action, adapter in actions:
            chosen = [one for one in requests if one.adapter == adapter]
            if action == "ask":
                requests += await ask(slots, adapter)
            elif chosen and action == "cancel":
                chosen[-1].task.cancel()
                requests.remove(chosen[-1])
            elif chosen and chosen[0].entered():
                await chosen[0].end()
                requests.remove(chosen[0])
            await settle()
            used = {one.adapter for one in requests if one.entered()} | {"e"}
            assert len(used) <= count
            assert used <= set(slots.resident)
            assert len(slots.resident) <= count
        while requests:
            running = [one for one in requests if one.entered()]
            assert running, "all wait for each other"
            for one in running:
                await one.end()
            requests = [one for one in requests if not one.entered() or not one.task.done()]
            await settle()
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(slots.using("a"))
        assert slots.waiting == 0

    asyncio.run(run())
