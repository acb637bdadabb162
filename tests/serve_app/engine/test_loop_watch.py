"""Reports of an event loop that is held, on a real one."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from serve_app.engine.loop_watch import LoopWatch
from serve_app.relay.request import RelayRequest
from tests.progress import STILL_S

LIMIT_S = STILL_S
BOUND_S = 0.05
HEADERS = [(b"x-request-id", b"abc-1")]
SECRET = "a prompt"


class Reports(logging.Handler):
    """The messages that were logged.

    Attributes:
        texts: The messages.
        came: Set with each.
    """

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.came = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())
        self.came.set()


@pytest.fixture
def reports() -> Iterator[Reports]:
    handler = Reports()
    logger = logging.getLogger("ray.serve")
    logger.addHandler(handler)
    yield handler
    logger.removeHandler(handler)


async def watched(hold: Callable[[], None], reports: Reports) -> LoopWatch:
    """Run `hold` on a loop that is watched, and return once the loop turns again."""
    watch = LoopWatch(BOUND_S, BOUND_S / 5).start()
    try:
        reports.came.clear()
        hold()
        reports.came.clear()
        async with asyncio.timeout(LIMIT_S):
            await asyncio.to_thread(reports.came.wait, LIMIT_S)
    finally:
        watch.stop()
    return watch


async def test_a_request_in_vllm_s_application_is_named(reports: Reports) -> None:
    def parse(body: str) -> None:
        # So does a long computation, until the thread has seen it.
        assert reports.came.wait(LIMIT_S)

    def app(scope: dict[str, Any], body: str) -> None:
        parse(body)

    scope = {"type": "http", "path": "/v1/chat/completions", "headers": HEADERS}
    began = time.monotonic()
    watch = await watched(lambda: app(scope, SECRET), reports)
    first, second = reports.texts
    assert "a request to /v1/chat/completions (id 'abc-1')" in first
    assert "engine/test_loop_watch.py" in first
    assert " parse, " in first
    assert SECRET not in first
    assert "turns again; it was held for" in second
    assert BOUND_S <= watch.take_longest() <= time.monotonic() - began
    assert watch.take_longest() == 0.0


async def test_a_request_of_our_own_is_named(reports: Reports) -> None:
    def answer(relayed: RelayRequest) -> None:
        assert reports.came.wait(LIMIT_S)

    await watched(lambda: answer(RelayRequest("POST", "/generate", b"", HEADERS, b"{}")), reports)
    assert "a request to /generate (id 'abc-1')" in reports.texts[0]


async def test_work_that_no_request_has_asked_for_is_reported_too(reports: Reports) -> None:
    def collect() -> None:
        assert reports.came.wait(LIMIT_S)

    await watched(collect, reports)
    assert "by no known request" in reports.texts[0]
    assert " collect, " in reports.texts[0]


async def test_a_loop_that_turns_is_not_reported(reports: Reports) -> None:
    turns = 0
    turned = asyncio.Event()

    def turn() -> None:
        nonlocal turns
        turns += 1
        if turns == 20:
            turned.set()
        else:
            asyncio.get_running_loop().call_later(0.001, turn)

    watch = LoopWatch(bound_s=LIMIT_S, tick_s=0.001).start()
    turn()
    async with asyncio.timeout(LIMIT_S):
        await turned.wait()
    watch.stop()
    assert reports.texts == []


async def test_a_stack_that_can_not_be_read_is_logged_and_the_watch_goes_on(reports: Reports) -> None:
    class Odd(dict[str, Any]):
        """A variable of another's code, of which nothing can be asked."""

        def get(self, *_: Any) -> Any:
            raise ValueError("odd")

    def hold(until: str, variable: object = None) -> None:
        while not any(until in text for text in reports.texts):
            assert reports.came.wait(LIMIT_S)
            reports.came.clear()

    watch = LoopWatch(BOUND_S, BOUND_S / 5).start()
    try:
        hold("the watch over the event loop failed", Odd())
        async with asyncio.timeout(LIMIT_S):
            while not any("turns again" in text for text in reports.texts):  # noqa: ASYNC110
                await asyncio.sleep(0.001)
        hold(" hold, ")
    finally:
        watch.stop()
