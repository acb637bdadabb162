"""Waits of the tests: what counts as progress, and the end for want of it."""

import subprocess
import sys
from collections.abc import Callable

import pytest

from tests.fakes.clock import Clock
from tests.progress import MOST_S, STILL_S, Work, finish, wait_until


def waited(true: Callable[[Clock], bool], news: Callable[[Clock], object], most_s: float = MOST_S) -> float:
    """Return the seconds that a wait took, or at which it gave up."""
    clock = Clock()
    wait_until(
        lambda: true(clock),
        news=lambda: news(clock),
        most_s=most_s,
        every_s=1.0,
        clock=clock,
        sleep=clock.sleep,
    )
    return clock.now


def test_a_wait_lasts_as_long_as_there_is_news() -> None:
    slow = 10 * STILL_S
    assert waited(lambda clock: clock.now >= slow, lambda clock: clock.now // (STILL_S - 2)) == slow


def test_a_wait_without_news_gives_up() -> None:
    with pytest.raises(AssertionError, match="nothing new in 120 s"):
        waited(lambda clock: clock.now >= STILL_S + 1, lambda clock: None)


def test_a_wait_with_news_for_ever_gives_up_at_its_bound() -> None:
    with pytest.raises(AssertionError, match="not within 300 s"):
        waited(lambda clock: False, lambda clock: clock.now, most_s=300.0)


HANGS = "import time; print('begun', flush=True); time.sleep(3600)"
SPINS = "print('begun', flush=True)\nwhile True: pass"


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_a_process_that_hangs_does_not_work_and_one_that_computes_does() -> None:
    programs = [
        subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
        for script in (HANGS, SPINS)
    ]
    try:
        for program in programs:
            assert program.stdout
            assert program.stdout.readline() == "begun\n"
        hanging, spinning = (program.pid for program in programs)
        hangs, spins = Work(lambda: [hanging], look_s=0.1), Work(lambda: [spinning], look_s=0.1)
        # The end of its start may count as work.
        wait_until(lambda: spins() >= 3, news=lambda: hangs() < 0, every_s=0.05)
        before = hangs()
        wait_until(lambda: spins() >= 8, news=lambda: hangs() < 0, every_s=0.05)
        assert hangs() == before
    finally:
        for program in programs:
            program.kill()
            program.communicate()


def test_a_program_that_hangs_is_ended_with_its_children() -> None:
    child = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {HANGS!r}])"
    process = subprocess.Popen([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
    with pytest.raises(AssertionError, match=r"nothing new in 0.1 s"):
        finish(process, still_s=0.1)
    assert process.wait(STILL_S) == -9
