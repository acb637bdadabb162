"""Times of an engine's steps."""

import asyncio
from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.engine.vllm.steps import StepTimer


class Batcher:
    """Stands for a batcher."""

    def __init__(self) -> None:
        self.steps: list[float] = []

    def step(self, seconds: float) -> None:
        self.steps.append(seconds)


def timer(batcher: Batcher | None) -> Any:
    timer: Any = StepTimer()
    timer.batcher = batcher
    return timer


def running(requests: int, steps: int = 0) -> Any:
    return SimpleNamespace(num_running_reqs=requests, step_counter=steps)


async def test_a_step_takes_from_the_one_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    times = iter([10.0, 10.5, 12.5])
    monkeypatch.setattr("serve_app.engine.vllm.steps.time", SimpleNamespace(monotonic=lambda: next(times)))
    batcher = Batcher()
    steps = timer(batcher)
    for _ in range(3):
        steps.record(running(1), None)
    assert batcher.steps == []
    await asyncio.sleep(0)
    assert batcher.steps == [0.5, 2.0]


async def test_statistics_of_several_steps_are_one_step_of_their_mean_time(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    times = iter([10.0, 11.0, 13.0])
    monkeypatch.setattr("serve_app.engine.vllm.steps.time", SimpleNamespace(monotonic=lambda: next(times)))
    batcher = Batcher()
    steps = timer(batcher)
    for count in (1, 4, 1):
        steps.record(running(1, count), None)
    await asyncio.sleep(0)
    assert batcher.steps == [0.25, 2.0]


async def test_the_time_without_requests_is_no_step() -> None:
    batcher = Batcher()
    steps = timer(batcher)
    for requests in (1, 0, 1):
        steps.record(running(requests), None)
    steps.record(None, None)
    await asyncio.sleep(0)
    assert len(batcher.steps) == 1


async def test_steps_before_there_is_a_batcher_are_dropped() -> None:
    timer(None).record(running(1), None)
