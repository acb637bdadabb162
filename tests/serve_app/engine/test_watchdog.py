"""A hang is told from idleness, long steps and a machine that sleeps; a loop that is held is reported."""

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.engine.watchdog import EngineWatch, LoopWatch
from serve_app.relay.request import RelayRequest
from tests.progress import STILL_S

LIMIT_S = STILL_S
INTERVAL_S = 1.0
BOUND_S = 0.05
HEADERS = [(b"x-request-id", b"abc-1")]
SECRET = "a prompt"


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False
    busy: bool = True
    steps: int = 0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """An engine that is looked at once in an interval."""

    clock: Clock
    engine: FakeEngine
    watch: EngineWatch

    def hangs(self, looks: int, *, busy: bool = True, step_every: int = 0, gap_s: float = INTERVAL_S) -> bool:
        """Return whether any of the looks found it hanging."""
        self.engine.busy = busy
        for look in range(1, looks + 1):
            self.clock.now += gap_s
            if step_every and look % step_every == 0:
                self.engine.steps += 1
            if self.watch.hangs():
                return True
        return False


@pytest.fixture
def engine() -> Watched:
    clock = Clock()
    engine: Any = FakeEngine()
    watch = EngineWatch(
        engine, 10.0, excused=lambda: False, last=lambda: None, interval_s=INTERVAL_S, clock=clock
    )
    return Watched(clock, engine, watch)


def test_an_engine_that_has_work_and_makes_no_step_hangs_once_the_time_is_up(engine: Watched) -> None:
    assert not engine.hangs(10)
    assert engine.hangs(1)


def test_an_idle_engine_never_hangs(engine: Watched) -> None:
    assert not engine.hangs(1000, busy=False)


def test_the_time_starts_with_the_work_and_not_before(engine: Watched) -> None:
    engine.hangs(1000, busy=False)
    assert not engine.hangs(9)


def test_a_long_step_is_no_hang(engine: Watched) -> None:
    assert not engine.hangs(1000, step_every=9)


def test_a_step_starts_the_time_anew(engine: Watched) -> None:
    engine.hangs(9)
    engine.hangs(1, step_every=1)
    assert not engine.hangs(9)
    assert engine.hangs(1)


def test_silence_before_a_pause_is_forgotten_when_work_comes_again(engine: Watched) -> None:
    engine.hangs(9)
    engine.hangs(1, busy=False)
    assert not engine.hangs(9)


def test_a_machine_that_slept_is_no_hang(engine: Watched) -> None:
    engine.hangs(2)
    assert not engine.hangs(1, gap_s=3600.0)
    assert not engine.hangs(5)
    assert engine.hangs(5)


class EndedError(Exception):
    """Raised in place of the end of the process."""


async def ended(
    engine: Any,
    timeout_s: float = 100.0,
    *,
    excused: Callable[[], bool] = lambda: False,
    stop: bool = False,
) -> list[str]:
    """Watch an engine until the process would end, or the watch is stopped; return what was done before."""
    done: list[str] = []

    def end(status: int) -> None:
        done.append(f"exit {status}")
        raise EndedError

    watch = EngineWatch(
        engine,
        timeout_s,
        excused=excused,
        last=lambda: done.append("last"),
        interval_s=0.001,
        answers_s=0.001,
        end=end,
    ).start()
    if stop:
        watch.stop()
    with suppress(EndedError, asyncio.CancelledError):
        async with asyncio.timeout(LIMIT_S):
            while True:
                await asyncio.sleep(0)
                # As health checks do.
                watch.check()
    return done


async def test_the_death_of_the_engine_is_that_of_the_process() -> None:
    assert await ended(FakeEngine(died=True)) == ["last", "exit 1"]


async def test_an_engine_with_work_and_without_steps_ends_the_process() -> None:
    assert await ended(FakeEngine(), timeout_s=0.003) == ["last", "exit 1"]


async def test_an_engine_that_was_ended_on_purpose_is_left_alone() -> None:
    looks: list[bool] = []

    def excused() -> bool:
        looks.append(len(looks) < 5)
        return looks[-1]

    await ended(FakeEngine(died=True), excused=excused)
    assert looks == [True] * 5 + [False]


async def test_a_watch_that_is_stopped_ends_nothing() -> None:
    assert await ended(FakeEngine(died=True), stop=True) == []


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
    assert "engine/test_watchdog.py" in first
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
