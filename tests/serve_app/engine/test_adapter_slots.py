"""Places of adapters, under any order of requests."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from serve_app.engine.adapters import AdapterSlots
from tests.progress import STILL_S

LIMIT_S = STILL_S


class Batcher:
    """Requests for adapters, tried in their order, as a batcher does.

    Attributes:
        running: The requests that run, by adapter.
        waiting: The adapters of the requests that were refused, in their order.
    """

    def __init__(self, slots: AdapterSlots) -> None:
        self.slots = slots
        self.running: Counter[str] = Counter()
        self.waiting: list[str] = []
        slots.on_change = self.retry

    def ask(self, adapter: str) -> None:
        if self.slots.take(adapter):
            self.running[adapter] += 1
        else:
            self.waiting.append(adapter)

    def end(self, adapter: str) -> None:
        self.running[adapter] -= 1
        if self.slots.give(adapter):
            self.retry()

    def cancel(self, adapter: str) -> None:
        """Drop a request that waits."""
        self.waiting.remove(adapter)
        if adapter not in self.waiting and self.slots.unwanted(adapter):
            self.retry()

    def retry(self) -> None:
        waiting, self.waiting = self.waiting, []
        for adapter in waiting:
            self.ask(adapter)


def made(count: int, *adapters: str) -> Batcher:
    batcher = Batcher(AdapterSlots(count))
    for adapter in adapters:
        batcher.ask(adapter)
    return batcher


def test_a_free_place_is_taken_at_once_and_kept() -> None:
    batcher = made(2, "a", "b")
    assert batcher.running == {"a": 1, "b": 1}
    batcher.end("a")
    batcher.end("b")
    assert batcher.slots.resident == ["a", "b"]


def test_the_adapter_that_was_used_least_recently_gives_its_place() -> None:
    batcher = made(2)
    for adapter in ("a", "b", "a", "c"):
        batcher.ask(adapter)
        batcher.end(adapter)
    assert batcher.slots.resident == ["a", "c"]


def test_a_flood_on_the_adapters_that_are_loaded_does_not_keep_another_out() -> None:
    batcher = made(2, "a", "b", "c", "a", "b")
    # a drains, b goes on.
    assert (batcher.running, batcher.waiting) == ({"a": 1, "b": 2}, ["c", "a"])
    batcher.end("a")
    assert batcher.running == {"a": 0, "b": 2, "c": 1}
    assert batcher.waiting == ["a"]


def test_any_adapter_without_requests_ends_a_drain() -> None:
    batcher = made(2, "a", "b", "c", "a")
    batcher.end("b")
    assert (batcher.slots.resident, batcher.waiting) == (["c", "a"], [])


def test_a_drain_ends_when_nobody_wants_the_place_any_more() -> None:
    batcher = made(1, "a", "b", "b", "a")
    batcher.cancel("b")
    assert batcher.waiting == ["b", "a"]
    batcher.cancel("b")
    assert batcher.running == {"a": 2}


def test_a_drain_is_not_for_an_adapter_that_has_its_place() -> None:
    batcher = made(2, "a", "b", "c")
    batcher.end("a")
    assert batcher.running["c"] == 1
    batcher.ask("d")
    batcher.cancel("d")
    batcher.ask("b")
    assert (batcher.running["b"], batcher.waiting) == (2, [])


async def test_the_end_of_the_last_request_is_told() -> None:
    batcher = made(1, "a", "a")
    leaving = asyncio.ensure_future(batcher.slots.left("a"))
    batcher.end("a")
    await asyncio.sleep(0)
    assert not leaving.done()
    batcher.end("a")
    async with asyncio.timeout(LIMIT_S):
        await leaving
        await batcher.slots.left("a")


async def test_a_claim_goes_before_all_that_wait() -> None:
    batcher = made(1, "a")
    claimed, end = asyncio.Event(), asyncio.Event()

    async def claim() -> None:
        async with batcher.slots.claim("c"):
            claimed.set()
            await end.wait()

    claims = [asyncio.ensure_future(claim()) for _ in range(2)]
    await asyncio.sleep(0)
    batcher.ask("a")
    batcher.ask("b")
    batcher.end("a")
    batcher.ask("d")
    assert batcher.waiting == ["a", "b", "d"]
    async with asyncio.timeout(LIMIT_S):
        await claimed.wait()
        assert (batcher.slots.resident, batcher.waiting) == (["c"], ["a", "b", "d"])
        end.set()
        await asyncio.gather(*claims)
    assert (batcher.slots.resident, batcher.waiting) == (["a"], ["b", "d"])


async def test_a_claim_that_is_given_up_lets_the_others_in() -> None:
    batcher = made(1, "a")

    async def claim() -> None:
        async with batcher.slots.claim("c"):
            raise AssertionError

    claiming = asyncio.ensure_future(claim())
    await asyncio.sleep(0)
    batcher.ask("a")
    assert batcher.waiting == ["a"]
    claiming.cancel()
    with pytest.raises(asyncio.CancelledError):
        await claiming
    assert batcher.running == {"a": 2}


ADAPTERS = "abcde"
ACTIONS = st.lists(
    st.tuples(
        st.sampled_from([*["ask", "end"] * 3, "cancel", "remove", "claim", "give up", "loop", "look"]),
        st.sampled_from(ADAPTERS),
    ),
    min_size=4,
    max_size=60,
)


@given(st.integers(1, 3), ACTIONS)
def test_any_order_of_requests_keeps_the_places_and_leaves_nobody_out(
    count: int, actions: list[tuple[str, str]]
) -> None:
    async def run() -> None:
        slots = AdapterSlots(count)
        batcher = Batcher(slots)
        claims: dict[str, asyncio.Task[None]] = {}
        held: set[str] = set()
        release = asyncio.Event()

        async def claim(name: str) -> None:
            async with slots.claim(name):
                held.add(name)
                try:
                    await release.wait()
                finally:
                    held.discard(name)

        def used() -> set[str]:
            return {one for one in ADAPTERS if batcher.running[one]} | held

        def check() -> None:
            assert len(slots.resident) <= count
            assert used() <= set(slots.resident)

        for action, adapter in actions:
            if action == "ask":
                batcher.ask(adapter)
            elif action == "end" and batcher.running[adapter]:
                batcher.end(adapter)
            elif action == "cancel" and adapter in batcher.waiting:
                batcher.cancel(adapter)
            elif action == "remove":
                slots.remove(adapter)
            elif action == "claim" and adapter.upper() not in claims:
                name = adapter.upper()
                claims[name] = asyncio.ensure_future(claim(name))
            elif action == "give up" and (task := claims.pop(adapter.upper(), None)):
                task.cancel()
                await asyncio.wait([task])
            elif action == "loop":
                await asyncio.sleep(0)
            elif action == "look":
                # No place that a request could have is kept from it in silence.
                waiting = list(batcher.waiting)
                batcher.retry()
                assert batcher.waiting == waiting
            check()
        release.set()
        while batcher.waiting or claims or any(batcher.running.values()):
            before = [*batcher.waiting, *claims, *batcher.running.elements()]
            for one in list(batcher.running.elements()):
                batcher.end(one)
                check()
            for _ in range(4):
                await asyncio.sleep(0)
            claims = {name: task for name, task in claims.items() if not task.done()}
            assert [*batcher.waiting, *claims, *batcher.running.elements()] != before, (
                "all wait for each other"
            )
        check()

    asyncio.run(run())
