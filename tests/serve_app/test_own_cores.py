import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack

import pytest

from serve_app.own_cores import compute_threads

SCRIPT = """
import os, subprocess, sys
from serve_app.own_cores import OwnCores

child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
cores = OwnCores(int(sys.argv[1]), sys.argv[2])
for line in sys.stdin:
    cores.claim()
    print(*sorted(os.sched_getaffinity(child.pid)), "of", *sorted(os.sched_getaffinity(0)), flush=True)
child.communicate(b"\\n")
"""

ALL = sorted(os.sched_getaffinity(0))
pytestmark = pytest.mark.skipif(len(ALL) < 2, reason="there is one core")

Start = Callable[..., "Engine"]


class Engine:
    """A process that claims cores for its child."""

    def __init__(self, count: int, realm: str, allowed: set[int]) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", SCRIPT, str(count), realm],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=lambda: os.sched_setaffinity(0, allowed),
        )

    def claim(self) -> list[int]:
        """Claim, and return the cores of the child."""
        stdin, stdout = self.process.stdin, self.process.stdout
        assert stdin
        assert stdout
        stdin.write("\n")
        stdin.flush()
        kept, own = stdout.readline().split(" of ")
        # It is the engine that is kept to its cores, not who started it.
        assert [int(core) for core in own.split()] == ALL[: len(own.split())]
        return [int(core) for core in kept.split()]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(timeout=10)


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as stack:

        def start(count: int, allowed: list[int] = ALL) -> Engine:
            engine = Engine(count, f"test-{os.getpid()}", set(allowed))
            stack.callback(engine.kill)
            return engine

        yield start


def test_an_engine_is_kept_to_its_core(start: Start) -> None:
    engine = start(1)
    assert engine.claim() == ALL[:1]
    assert engine.claim() == ALL[:1]


def test_no_two_engines_have_the_same_and_one_core_stays_free(start: Start) -> None:
    engines = [start(1) for _ in ALL]
    kept = [engine.claim() for engine in engines]
    assert kept[:-1] == [[core] for core in ALL[:-1]]
    assert kept[-1] == ALL


def test_who_ends_makes_room(start: Start) -> None:
    first, second = start(1, ALL[:2]), start(1, ALL[:2])
    assert first.claim() == ALL[:1]
    assert second.claim() == ALL[:2]
    first.kill()
    assert second.claim() == ALL[:1]


@pytest.mark.parametrize("count", [0, len(ALL)])
def test_without_enough_of_them_it_runs_anywhere(count: int, start: Start) -> None:
    engine = start(count)
    assert engine.claim() == ALL
    # What it could not use is still there for others.
    assert start(1).claim() == ALL[:1]


def test_it_takes_none_that_it_may_not_use(start: Start) -> None:
    assert start(1, ALL[:1]).claim() == ALL[:1]
    assert start(1, ALL[:2]).claim() == ALL[:1]


@pytest.mark.parametrize(
    ("threads", "count"), [("3", 3), (" 4,2", 4), ("", os.cpu_count()), (None, os.cpu_count())]
)
def test_an_engine_has_as_many_threads_as_openmp_is_told(
    threads: str | None, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if threads is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", threads)
    assert compute_threads() == count
