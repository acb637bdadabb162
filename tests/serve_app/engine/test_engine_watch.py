"""A process ends with its engine."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest

from serve_app.engine.engine_watch import EngineWatch
from tests.progress import STILL_S

LIMIT_S = STILL_S


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False
    busy: bool = False
    steps: int = 0


class EndedError(Exception):
    """Raised in place of the end of the process."""


async def ended(watch: EngineWatch) -> None:
    """Raise what has ended a watch, as health checks do."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            await asyncio.sleep(0)
            watch.check()


Ending = Callable[..., Awaitable[list[str]]]


@pytest.fixture
def ending(monkeypatch: pytest.MonkeyPatch) -> Ending:
    """A function that watches an engine until the process would end; it returns what was done before."""
    done: list[str] = []

    def end(status: int) -> None:
        done.append(f"exit {status}")
        raise EndedError

    monkeypatch.setattr("os._exit", end)
    monkeypatch.setattr("serve_app.engine.engine_watch.WATCH_S", 0.001)
    monkeypatch.setattr("serve_app.engine.engine_watch.LAST_ANSWERS_S", 0.001)

    async def watched(
        engine: Any, timeout_s: float = 100.0, excused: Callable[[], bool] = lambda: False
    ) -> list[str]:
        watch = EngineWatch(engine, timeout_s, excused=excused, last=lambda: done.append("last"))
        with suppress(EndedError):
            await ended(watch)
        return done

    return watched


async def test_the_death_of_the_engine_is_that_of_the_process(ending: Ending) -> None:
    assert await ending(FakeEngine(died=True)) == ["last", "exit 1"]


async def test_an_engine_with_work_and_without_steps_ends_the_process(ending: Ending) -> None:
    assert await ending(FakeEngine(busy=True), timeout_s=0.003) == ["last", "exit 1"]


async def test_an_engine_that_was_ended_on_purpose_is_left_alone(ending: Ending) -> None:
    looks: list[bool] = []

    def excused() -> bool:
        looks.append(len(looks) < 5)
        return looks[-1]

    await ending(FakeEngine(died=True), excused=excused)
    assert looks == [True] * 5 + [False]


async def test_a_watch_that_is_stopped_ends_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.engine.engine_watch.WATCH_S", 0.0)
    monkeypatch.setattr("serve_app.engine.engine_watch.LAST_ANSWERS_S", 0.0)
    last: list[int] = []

    def flush() -> None:
        last.append(1)
        raise EndedError

    engine: Any = FakeEngine(died=True)
    watch = EngineWatch(engine, 100.0, excused=lambda: False, last=flush)
    watch.stop()
    with pytest.raises(asyncio.CancelledError):
        await ended(watch)
    assert last == []
