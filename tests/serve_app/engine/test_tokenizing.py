"""The queue in front of a tokenizer, with calls that end when the test says so."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from serve_app.api.errors import RequestError
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import AdmissionRequest, AdmissionResult, set_current
from serve_app.engine.tokenizing import LONG_AT_ONCE, LONG_BYTES, OTHERS_AT_ONCE, SHORT_BYTES, TokenizingQueue
from tests.progress import STILL_S

LIMIT_S = STILL_S
LONG = LONG_BYTES + 1


class Calls:
    """Calls that run until they are let go.

    Attributes:
        started: The names of those that a thread has begun, in order.
    """

    def __init__(self) -> None:
        self.started: list[str] = []
        self._go = threading.Event()
        self._begun = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __call__(self, name: str) -> Callable[[], str]:
        def call() -> str:
            self.started.append(name)
            self._loop.call_soon_threadsafe(self._begun.set)
            assert self._go.wait(LIMIT_S)
            return name

        return call

    def let_go(self) -> None:
        """Let all calls end."""
        self._go.set()

    async def begun(self) -> None:
        """Wait until a thread has begun one."""
        async with asyncio.timeout(LIMIT_S):
            await self._begun.wait()


@pytest.fixture
async def calls() -> Calls:
    return Calls()


@pytest.fixture
async def queue(calls: Calls) -> AsyncIterator[TokenizingQueue]:
    queue = TokenizingQueue(max_queue_size=2)
    await queue.start()
    yield queue
    calls.let_go()
    await queue.stop()


def request(
    queue: TokenizingQueue,
    call: Callable[[], str],
    characters: int = 1,
    *,
    size: int = 0,
    priority: int = 0,
    deadline: float | None = None,
    times: int = 1,
    adapter: str = "",
) -> "asyncio.Task[list[str]]":
    """Start a request that tokenizes so many texts."""

    async def run() -> list[str]:
        scheduling = Scheduling(priority=priority)
        set_current(AdmissionRequest(scheduling, deadline, size=size, adapter=adapter), AdmissionResult())
        async with asyncio.timeout(LIMIT_S):
            return await asyncio.gather(*(queue.run(call, characters) for _ in range(times)))

    return asyncio.ensure_future(run())


@pytest.mark.parametrize("long", [{"characters": LONG}, {"size": LONG}], ids=["text", "body"])
async def test_a_long_request_does_not_hold_up_the_others(
    queue: TokenizingQueue, calls: Calls, long: dict[str, Any]
) -> None:
    held = request(queue, calls("long"), **long)
    await calls.begun()
    assert await request(queue, lambda: "short") == ["short"]
    assert not held.done()
    calls.let_go()
    assert await held == ["long"]


def here() -> bool:
    """Return whether the event loop's thread runs this."""
    return threading.current_thread() is threading.main_thread()


@pytest.mark.parametrize(
    ("size", "characters", "at_once"),
    [
        (SHORT_BYTES, SHORT_BYTES, True),
        (SHORT_BYTES + 1, 1, False),
        (SHORT_BYTES, SHORT_BYTES + 1, False),
        (0, 1, False),
    ],
    ids=["short", "body", "template", "no body"],
)
async def test_a_short_request_is_tokenized_without_a_thread(
    queue: TokenizingQueue, size: int, characters: int, at_once: bool
) -> None:
    assert await request(queue, lambda: str(here()), characters, size=size) == [str(at_once)]


async def test_only_the_first_text_of_a_short_list_is_tokenized_without_a_thread(
    queue: TokenizingQueue,
) -> None:
    found = await request(queue, lambda: str(here()), size=SHORT_BYTES, times=3)
    assert found == ["True", "False", "False"]


async def test_an_error_of_a_short_request_gives_its_place_back(queue: TokenizingQueue) -> None:
    def broken() -> str:
        raise ValueError("not a text")

    for _ in range(OTHERS_AT_ONCE + 1):
        with pytest.raises(ValueError, match="not a text"):
            await request(queue, broken, size=1)
    assert await request(queue, lambda: "next", size=1) == ["next"]


async def test_texts_for_one_adapter_do_not_go_before_all_those_of_another(calls: Calls) -> None:
    queue = TokenizingQueue(max_queue_size=20)
    await queue.start()
    flood = [request(queue, calls("flood"), LONG, adapter="demo:letters") for _ in range(LONG_AT_ONCE + 5)]
    await calls.begun()
    light = request(queue, calls("light"), LONG, adapter="demo:symbols")
    await asyncio.sleep(0)
    calls.let_go()
    await asyncio.gather(*flood, light)
    await queue.stop()
    assert calls.started.index("light") == LONG_AT_ONCE + 1


async def test_a_full_queue_refuses_a_request_and_says_when_to_come_back(
    queue: TokenizingQueue, calls: Calls
) -> None:
    running = [request(queue, calls("long"), LONG) for _ in range(LONG_AT_ONCE + 2)]
    await calls.begun()
    with pytest.raises(RequestError) as caught:
        await request(queue, calls("late"), LONG)
    assert (caught.value.status, caught.value.retry_after_s is not None) == (429, True)
    calls.let_go()
    await asyncio.gather(*running)
    assert "late" not in calls.started


async def test_a_list_that_is_longer_than_the_queue_waits(queue: TokenizingQueue, calls: Calls) -> None:
    calls.let_go()
    assert len(await request(queue, calls("item"), LONG, times=10)) == 10


async def test_a_better_tier_goes_first(queue: TokenizingQueue, calls: Calls) -> None:
    running = [request(queue, calls("first"), LONG) for _ in range(LONG_AT_ONCE)]
    await calls.begun()
    behind = [
        request(queue, calls("flex"), LONG, priority=1),
        request(queue, calls("priority"), LONG, priority=-1),
    ]
    # Both wait before the first ends.
    await asyncio.sleep(0)
    calls.let_go()
    await asyncio.gather(*running, *behind)
    assert calls.started == ["first"] * LONG_AT_ONCE + ["priority", "flex"]


async def test_a_request_whose_time_is_over_is_not_tokenized(queue: TokenizingQueue, calls: Calls) -> None:
    with pytest.raises(RequestError) as caught:
        await request(queue, calls("late"), deadline=time.monotonic() - 1)
    assert caught.value.status == 408
    assert calls.started == []


async def test_a_client_that_leaves_gives_its_place_back_when_the_thread_has_ended(
    queue: TokenizingQueue, calls: Calls
) -> None:
    running = [request(queue, calls("left"), LONG) for _ in range(LONG_AT_ONCE)]
    await calls.begun()
    for each in running:
        each.cancel()
    await asyncio.wait(running)
    # Two more may wait, none may start.
    behind = [request(queue, calls("behind"), LONG) for _ in range(2)]
    with pytest.raises(RequestError):
        await request(queue, calls("late"), LONG)
    calls.let_go()
    assert await asyncio.gather(*behind) == [["behind"]] * 2


async def test_an_error_of_a_call_is_its_callers(queue: TokenizingQueue) -> None:
    def broken() -> str:
        raise ValueError("not a text")

    with pytest.raises(ValueError, match="not a text"):
        await request(queue, broken)
    assert await request(queue, lambda: "next") == ["next"]


async def test_a_stop_does_not_wait_for_a_thread_that_goes_on(queue: TokenizingQueue, calls: Calls) -> None:
    running = request(queue, calls("long"), LONG)
    await calls.begun()
    async with asyncio.timeout(LIMIT_S):
        await queue.stop(timeout_s=0.0)
    assert not running.done()
    calls.let_go()
    assert await running == ["long"]


async def test_after_a_stop_texts_are_refused(queue: TokenizingQueue) -> None:
    await queue.stop()
    with pytest.raises(RequestError) as caught:
        await request(queue, lambda: "late")
    assert caught.value.status == 503
