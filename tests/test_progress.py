"""Waits of the tests: what counts as progress, and the end for want of it."""

import itertools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.progress import LOOK_S, MOST_S, STILL_S, Work, finish, run, wait_until


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


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


def test_the_value_of_the_condition_is_returned() -> None:
    values = iter([[], [], [3]])
    assert wait_until(lambda: next(values), news=lambda: None, every_s=0.0) == [3]


class Tasks:
    """Processes as Linux shows them: one of two threads, and what they have done."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.pids = [7]
        self.show(0.0, 0.0)

    def show(self, ran_s: float, waited_s: float, read: int = 0) -> None:
        """Set the time on a core and for one of the second thread, and the bytes that were read."""
        for thread, times in ((7, (0.0, 0.0)), (8, (ran_s, waited_s))):
            task = self.folder / "7" / "task" / str(thread)
            task.mkdir(parents=True, exist_ok=True)
            ran, waited = (int(1e9 * seconds) for seconds in times)
            (task / "schedstat").write_text(f"{ran} {waited} 1\n")
        (self.folder / "7" / "io").write_text(f"rchar: {2 * read + 5}\nread_bytes: {read}\n")


@pytest.mark.parametrize(
    ("ran_s", "waited_s", "read", "works"),
    [
        # A daemon that polls, alone and on a crowded machine.
        (0.03, 0.0, 0, False),
        (0.03, 0.3, 0, False),
        # A program that has a core, and another that gets a twentieth of one.
        (0.9, 0.0, 0, True),
        (0.05, 0.8, 0, True),
        # A program that waits for a disk.
        (0.01, 0.0, 4096, True),
    ],
)
def test_a_process_works_if_a_thread_wants_a_core_or_reads(
    tmp_path: Path, ran_s: float, waited_s: float, read: int, works: bool
) -> None:
    tasks, clock = Tasks(tmp_path), Clock()
    work = Work(lambda: tasks.pids, clock, tmp_path)
    before = work()
    clock.now += LOOK_S
    tasks.show(LOOK_S * ran_s, LOOK_S * waited_s, read)
    assert (work() != before) is works


def test_a_new_process_is_work_and_one_that_ends_is_none(tmp_path: Path) -> None:
    tasks, clock = Tasks(tmp_path), Clock()
    work = Work(lambda: tasks.pids, clock, tmp_path)
    seen = [work()]
    for pids in ([7, 9], [7], [], [7, 9], [7, 11]):
        tasks.pids = pids
        clock.now += LOOK_S
        seen.append(work())
    assert [after != before for before, after in itertools.pairwise(seen)] == [
        True, False, False, False, True,
    ]  # fmt: skip


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


def test_a_program_is_run_to_its_end() -> None:
    script = "import os, sys; print(sys.stdin.read() + os.environ['GIVEN']); sys.exit(3)"
    done = run([sys.executable, "-c", script], input="said and ", env=os.environ | {"GIVEN": "given"})
    assert (done.stdout, done.stderr, done.returncode) == ("said and given\n", "", 3)
    with pytest.raises(subprocess.CalledProcessError):
        run([sys.executable, "-c", "raise SystemExit(1)"], check=True)
