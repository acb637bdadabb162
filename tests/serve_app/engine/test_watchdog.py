"""A hang is told from idleness, long steps and a machine that sleeps; a loop that is held is reported."""

import asyncio
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.engine.watchdog import EngineWatch, LoopWatch
from tests.fakes.clock import Clock
from tests.progress import STILL_S

LIMIT_S = STILL_S
INTERVAL_S = 1.0
BOUND_S = 0.05


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False
    busy: bool = True
    steps: int = 0


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
    clock = Clock(100.0)
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


# The event loop.

TICK_S = 0.001


def watched(bound_s: float, hold: Callable[[], object]) -> tuple[float, float]:
    """Run `hold` on a loop that is watched; return the longest hold, and the longest one after it."""

    async def run() -> tuple[float, float]:
        watch = LoopWatch(bound_s, TICK_S).start()
        hold()
        # It ends behind the tick that was due meanwhile.
        await asyncio.sleep(TICK_S)
        watch.stop()
        return watch.take_longest(), watch.take_longest()

    return asyncio.run(run())


def test_a_loop_that_is_held_is_logged_with_its_calls(caplog: pytest.LogCaptureFixture) -> None:
    def hold_the_loop() -> None:
        while not caplog.messages:
            time.sleep(TICK_S)

    longest_s, then_s = watched(BOUND_S, hold_the_loop)
    assert longest_s >= BOUND_S > then_s == 0.0
    (message,) = caplog.messages
    assert "the event loop has been held for" in message
    assert "in hold_the_loop" in message


def test_a_loop_that_turns_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    watched(LIMIT_S, lambda: None)
    assert caplog.text == ""
