"""A hang is told from idleness, from long steps and from a machine that sleeps."""

from dataclasses import dataclass

import pytest

from serve_app.engine.watchdog import Watchdog

INTERVAL_S = 1.0


@dataclass
class Clock:
    now: float = 100.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Watched:
    """An engine that is looked at once in an interval."""

    clock: Clock
    dog: Watchdog
    steps: int = 0

    def hangs(self, looks: int, *, busy: bool = True, step_every: int = 0, gap_s: float = INTERVAL_S) -> bool:
        """Return whether any of the looks found it hanging."""
        for look in range(1, looks + 1):
            self.clock.now += gap_s
            if step_every and look % step_every == 0:
                self.steps += 1
            if self.dog.look(busy=busy, steps=self.steps):
                return True
        return False


@pytest.fixture
def engine() -> Watched:
    clock = Clock()
    return Watched(clock, Watchdog(10.0, INTERVAL_S, clock))


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
