"""The turns of Engines in virtual time, with a fake of vLLM and real files that the kernel locks."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from batcher import Closed, ContinuousBatcher, QueueFull
from serve_app.engine.turns import EngineTurns
from serve_app.settings.turns import ShareSettings
from serve_app.telemetry.catalogue import AWAKE, SWITCHING, TURNS_BEGUN, Metric
from serve_app.telemetry.histogram import Instrument
from serve_app.telemetry.meters import Meters
from serve_app.turns.board import Board
from tests.batcher.virtual import now, virtual

SLEEP_S, WAKE_S = 0.5, 0.25

PIN_S = 21.0
"""Seconds more that the first sleep of an engine takes."""


class FakeDevice:
    """The memory of a device: the engines that have it."""

    def __init__(self) -> None:
        self.awake: set[str] = set()


class FakeSleeper:
    """Stands for a vLLM engine that can sleep."""

    def __init__(self, name: str, device: FakeDevice) -> None:
        self.name = name
        self.device = device
        self.device.awake.add(name)
        self.busy = self.died = self.released = False
        self.sleep_s, self.wake_s, self.pin_s = SLEEP_S, WAKE_S, PIN_S
        self.broken: Exception | None = None

    async def sleep(self) -> None:
        assert not self.busy
        await asyncio.sleep(self.pin_s + self.sleep_s)
        self.pin_s = 0.0
        self.device.awake.remove(self.name)

    async def wake_up(self) -> None:
        assert not self.device.awake
        self.device.awake.add(self.name)
        await asyncio.sleep(self.wake_s)
        if self.broken is not None:
            raise self.broken

    def release(self) -> None:
        self.released = True
        self.device.awake.discard(self.name)


class Engine:
    """An engine of a group, with its batcher."""

    def __init__(self, folder: Path, device: FakeDevice, name: str) -> None:
        self.name = name
        self.device = device
        self.board = Board(folder)
        settings = ShareSettings(min_turn_s=2.0, max_wait_s=20.0)
        self.turns = EngineTurns(name, "g", ("gpu",), settings, self.board, now)
        self.batcher = ContinuousBatcher(capacity=100, max_queue_size=3, clock=now)
        self.sleeper: FakeSleeper
        self.answered = 0

    async def start(self, load_s: float = 1.0) -> None:
        await self.turns.first()
        assert not self.device.awake
        self.sleeper = FakeSleeper(self.name, self.device)
        await asyncio.sleep(load_s)
        await self.batcher.start()
        await self.turns.rehearse(self.sleeper, self.batcher)
        self.turns.run(self.sleeper, self.batcher)

    async def answer(self, seconds: float, cost: int = 10) -> None:
        """Run a request, for as long as it takes."""
        async with self.batcher.slot_nowait(cost):
            assert self.device.awake == {self.name}
            await asyncio.sleep(seconds)
        self.answered += 1

    def kill(self) -> None:
        """End the engine: the kernel frees its memory, and the lock of its file."""
        self.turns.stop()
        self.sleeper.release()
        self.board.close()


@asynccontextmanager
async def trio() -> AsyncGenerator[list[Engine], None]:
    """Three engines that have come up; the last one is awake."""
    with TemporaryDirectory() as folder:
        device = FakeDevice()
        engines = [Engine(Path(folder), device, name) for name in "abc"]
        async with asyncio.timeout(120):
            await asyncio.gather(*(engine.start() for engine in engines))
        try:
            yield engines
        finally:
            for engine in engines:
                engine.turns.stop()
                engine.board.close()


def meters(values: dict[tuple[str, ...], float]) -> Meters:
    """Return meters that put the last value of each series into `values`."""

    def make(metric: Metric) -> Instrument:
        def record(value: float, labels: dict[str, str]) -> None:
            values[metric.name, *labels.values()] = value

        return record

    return Meters((AWAKE, TURNS_BEGUN, SWITCHING), make)


def states(engines: list[Engine]) -> list[str]:
    return [engine.turns.state for engine in engines]


async def reach(engine: Engine, state: str) -> None:
    """Return once an engine is in a state."""
    for _ in range(6_000):
        if engine.turns.state == state:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"not {state} within a minute")


@virtual
async def test_engines_come_up_one_after_the_other_and_answer_in_turns() -> None:
    async with trio() as engines:
        assert sorted(states(engines)) == ["asleep", "asleep", "awake"]
        await asyncio.gather(*(engine.answer(0.5) for engine in engines for _ in range(3)))
        assert [engine.answered for engine in engines] == [3, 3, 3]
        assert sum(engine.turns.stats()["turns"] for engine in engines) == 5
        assert all(engine.turns.stats()["sleep_s"] in {0.0, SLEEP_S} for engine in engines)


@virtual
async def test_the_first_switch_of_each_engine_is_as_fast_as_the_others() -> None:
    async with trio() as engines:
        rounds = []
        for _ in range(3):
            began = now()
            for engine in engines:
                await engine.answer(0.0)
            rounds.append(now() - began)
        assert rounds == pytest.approx(rounds[-1:] * 3, abs=1.0)
        assert rounds[0] < PIN_S


@virtual
async def test_an_engine_that_can_not_sleep_does_not_come_up(tmp_path: Path) -> None:
    engine = Engine(tmp_path, FakeDevice(), "a")
    await engine.turns.first()
    sleeper = FakeSleeper("a", engine.device)
    sleeper.broken = ValueError("no memory of the host")
    with pytest.raises(RuntimeError, match="a failed to fall asleep and wake up: no memory of the host"):
        await engine.turns.rehearse(sleeper, engine.batcher)


@virtual
async def test_a_switch_lets_what_runs_end_and_starts_nothing_more() -> None:
    async with trio() as engines:
        (awake,) = [engine for engine in engines if engine.turns.state == "awake"]
        other = engines[0] if engines[0] is not awake else engines[1]
        running = asyncio.create_task(awake.answer(12.0))
        await asyncio.sleep(2.5)
        waiting = asyncio.create_task(other.answer(0.1))
        await reach(awake, "draining")
        late = asyncio.create_task(awake.answer(0.1))
        await running
        assert (other.answered, awake.batcher.load.waiting) == (0, 1)
        await waiting
        await late
        assert awake.turns.stats()["turns"] == 2


@virtual
async def test_the_wait_of_a_refused_request_contains_the_turn() -> None:
    async with trio() as engines:
        (awake,) = [engine for engine in engines if engine.turns.state == "awake"]
        other = engines[0] if engines[0] is not awake else engines[1]
        await awake.answer(50.0, 100)
        long = [asyncio.create_task(awake.answer(100.0, 100)) for _ in range(3)]
        await asyncio.sleep(0.2)
        waiting = [asyncio.create_task(other.answer(0.1)) for _ in range(3)]
        await asyncio.sleep(3.0)
        with pytest.raises(QueueFull) as refusal:
            await other.answer(0.1)
        # The wait of the first is over in 20 - 3 s.
        assert 16.0 < refusal.value.retry_after_s < 25.0
        await asyncio.gather(*waiting)
        for task in long:
            task.cancel()


@pytest.mark.parametrize("moment", ["draining", "waking"])
@virtual
async def test_the_others_go_on_when_an_engine_dies_in_the_middle_of_a_switch(moment: str) -> None:
    async with trio() as engines:
        (awake,) = [engine for engine in engines if engine.turns.state == "awake"]
        other, third = [engine for engine in engines if engine is not awake]
        running = asyncio.create_task(awake.answer(3.0))
        waiting = asyncio.create_task(other.answer(0.1))
        victim = other if moment == "waking" else awake
        await reach(victim, moment)
        victim.kill()
        await third.answer(0.1)
        if victim is awake:
            await waiting
        for task in (running, waiting):
            task.cancel()


@pytest.mark.parametrize("error", [MemoryError("no memory"), TimeoutError()])
@virtual
async def test_an_engine_that_fails_to_wake_up_says_why_and_the_others_go_on(error: Exception) -> None:
    async with trio() as engines:
        (awake,) = [engine for engine in engines if engine.turns.state == "awake"]
        broken, third = [engine for engine in engines if engine is not awake]
        broken.sleeper.broken = error
        with pytest.raises(Closed):
            await broken.answer(0.1)
        assert broken.sleeper.released
        refusal = broken.turns.refusal
        assert refusal is not None
        assert refusal.status == 503
        assert f"failed to wake up: {str(error) or 'TimeoutError'}" in refusal.message
        assert broken.turns.stats()["cause"] in refusal.message
        await asyncio.gather(awake.answer(0.1), third.answer(0.1))
        broken.turns.check_health()
        await asyncio.sleep(60)
        # Ray Serve replaces it.
        with pytest.raises(RuntimeError, match="failed to wake up"):
            broken.turns.check_health()
        awake.turns.check_health()


@virtual
async def test_a_dead_engine_is_left_to_its_watchdog() -> None:
    async with trio() as engines:
        broken = next(engine for engine in engines if engine.turns.state == "asleep")
        broken.sleeper.died = True
        broken.sleeper.broken = RuntimeError("it died")
        waiting = asyncio.create_task(broken.answer(0.1))
        await reach(broken, "waking")
        await asyncio.sleep(1.0)
        assert broken.turns.refusal is None
        assert not broken.sleeper.released
        waiting.cancel()


@virtual
async def test_work_of_a_sleeping_engine_is_told_at_once() -> None:
    async with trio() as engines:
        await asyncio.sleep(10.0)
        asleep = next(engine for engine in engines if engine.turns.state == "asleep")
        began = now()
        await asleep.answer(0.0)
        assert now() - began < SLEEP_S + WAKE_S + 0.3


@virtual
async def test_metrics_have_the_awake_model_its_turns_and_the_cost_of_switches() -> None:
    async with trio() as engines:
        asleep = next(engine for engine in engines if engine.turns.state == "asleep")
        await asleep.answer(0.0)
        values: dict[tuple[str, ...], float] = {}
        for engine in engines:
            engine.turns.report(meters(values))
        awake, turns, still = (metric.name for metric in (AWAKE, TURNS_BEGUN, SWITCHING))
        models = {engine.name: float(engine is asleep) for engine in engines}
        assert {model: values[awake, model, "g"] for model in models} == models
        assert {model: values[turns, model, "g"] - 1 for model in models} == models
        # The device stood still for the sleep of the other engine and for the wake-up.
        assert values.pop((still, asleep.name, "g")) == pytest.approx(SLEEP_S + WAKE_S, abs=0.2)
        assert still not in {name for name, *_ in values}


@pytest.mark.parametrize("switch", ["sleep", "wake"])
@virtual
async def test_an_engine_has_the_device_for_as_long_as_its_switch_takes(switch: str) -> None:
    async with trio() as engines:
        (awake,) = [engine for engine in engines if engine.turns.state == "awake"]
        second, third = [engine for engine in engines if engine is not awake]
        awake.sleeper.sleep_s = 20.0 if switch == "sleep" else SLEEP_S
        second.sleeper.wake_s = 20.0 if switch == "wake" else WAKE_S
        requests = [asyncio.create_task(second.answer(0.1))]
        await reach(*((awake, "draining") if switch == "sleep" else (second, "waking")))
        await asyncio.sleep(0.1)
        requests.append(asyncio.create_task(third.answer(0.1)))
        # An engine that wakes up beside another engine fails.
        await asyncio.gather(*requests)
        assert (second.answered, third.answered) == (1, 1)


@virtual
async def test_no_engine_takes_the_device_of_an_engine_that_loads_for_long(tmp_path: Path) -> None:
    """The constructor of an engine holds its event loop, and no entry is written meanwhile."""
    device = FakeDevice()
    first, second = Engine(tmp_path, device, "a"), Engine(tmp_path, device, "b")
    # An engine that loads beside another engine fails.
    await asyncio.gather(first.start(load_s=30.0), second.start())
    await asyncio.gather(first.answer(0.1), second.answer(0.1))
    for engine in (first, second):
        engine.turns.stop()


@virtual
async def test_engines_stay_as_they_are_while_the_files_are_lost(tmp_path: Path) -> None:
    device = FakeDevice()
    first, second = Engine(tmp_path / "f", device, "a"), Engine(tmp_path / "f", device, "b")
    await asyncio.gather(first.start(), second.start())
    await second.answer(0.1)
    (tmp_path / "f").rename(tmp_path / "away")
    waiting = asyncio.create_task(first.answer(0.1))
    await asyncio.sleep(30.0)
    assert [first.turns.state, second.turns.state] == ["asleep", "awake"]
    (tmp_path / "away").rename(tmp_path / "f")
    await waiting
    for engine in (first, second):
        engine.turns.stop()
