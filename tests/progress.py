"""Waits that end for want of progress, not at a total that holds on one machine only."""

import asyncio
import math
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, TypeVar

T = TypeVar("T")

STILL_S = 120.0
"""Seconds without anything new after which a wait gives up, and the limit of a single step of a test."""

MOST_S = 1500.0
"""Seconds of any wait at most: what spins makes progress for ever. It is less than pytest's own limit."""

ANSWER_S = 300.0
"""Seconds for an answer over HTTP: before its first byte, a client can't see whether the service works."""

LOOK_S = 2.0
"""Seconds between two looks at processes, at least: each reads files for every thread."""

BUSY = 0.5
"""Share of the time from which a thread counts as busy; those of an idle Ray stay below a tenth."""

TASKS = Path("/proc")
"""The folder in which Linux shows processes; without it, only output counts as progress."""


class Work:
    """Tells whether processes work: its value changes with each process that comes, and while one is busy.

    A process is busy if it reads from a disk, or if one of its threads ran or waited for a core for more than
    half of the time since the last look. So a start on a crowded machine is busy however little of a core it
    gets, and daemons that only poll are not.

    Args:
        pids: Returns the processes.
        clock: Returns seconds.
        tasks: Where Linux shows processes.
        look_s: Seconds between two looks, at least.
    """

    def __init__(
        self,
        pids: Callable[[], Iterable[int]],
        clock: Callable[[], float] = time.monotonic,
        tasks: Path = TASKS,
        look_s: float = LOOK_S,
    ) -> None:
        self._pids = pids
        self._clock = clock
        self._tasks = tasks
        self._look_s = look_s
        self._looked_at = -math.inf
        self._known: set[int] = set()
        self._read: dict[int, int] = {}
        self._wanted: dict[tuple[int, int], int] = {}
        self._count = 0

    def __call__(self) -> int:
        """Return a number that is larger than the last one if there was work meanwhile."""
        now = self._clock()
        if (passed := now - self._looked_at) < self._look_s:
            return self._count
        self._looked_at = now
        pids = set(self._pids())
        read = {pid: count for pid in pids if (count := self._bytes_read(pid)) is not None}
        wanted = {thread: ns for pid in pids for thread, ns in self._core_time(pid)}
        self._count += (
            not pids <= self._known
            or any(count > self._read.get(pid, count) for pid, count in read.items())
            or any(ns - self._wanted.get(key, ns) > BUSY * passed * 1e9 for key, ns in wanted.items())
        )
        self._known |= pids
        self._read, self._wanted = read, wanted
        return self._count

    def _bytes_read(self, pid: int) -> int | None:
        """Return the bytes that a process has read from disks; None: it has ended, or is another user's."""
        with suppress(OSError):
            for line in (self._tasks / str(pid) / "io").read_text().splitlines():
                name, _, count = line.partition(": ")
                if name == "read_bytes":
                    return int(count)
        return None

    def _core_time(self, pid: int) -> Iterable[tuple[tuple[int, int], int]]:
        """Yield the threads of a process, each with the nanoseconds that it ran or waited for a core."""
        with suppress(OSError):
            for task in (self._tasks / str(pid) / "task").iterdir():
                with suppress(OSError):
                    ran, waited, _ = (task / "schedstat").read_text().split()
                    yield (pid, int(task.name)), int(ran) + int(waited)


def descendants(pid: int | None = None) -> list[int]:
    """Return the ids of all descendants of a process; None: of this one."""
    try:
        import psutil
    except ImportError:
        # The tests of the batcher run without it.
        return []
    try:
        return [child.pid for child in psutil.Process(pid).children(recursive=True)]
    except psutil.NoSuchProcess:
        return []


def wait_until(
    true: Callable[[], T],
    still_s: float = STILL_S,
    *,
    news: Callable[[], object] | None = None,
    tell: Callable[[], object] = str,
    most_s: float = MOST_S,
    every_s: float = 0.2,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> T:
    """Wait until a condition holds; return its value.

    Args:
        true: The condition.
        still_s: Seconds without news after which it fails.
        news: Returns a value that changes with progress; None: the work of all that this process has started.
        tell: Returns what the failure should say beside the time.
        most_s: Seconds at most.
        every_s: Seconds between two looks.
        clock: Returns seconds.
        sleep: Waits for seconds.
    """
    news = news or Work(descendants)
    began = new_at = clock()
    seen: object = None
    while not (value := true()):
        now = clock()
        if (found := news()) != seen:
            seen, new_at = found, now
        assert now - new_at < still_s, f"nothing new in {still_s:g} s; {tell()}"
        assert now - began < most_s, f"not within {most_s:g} s; {tell()}"
        sleep(every_s)
    return value


async def until(condition: Callable[[], object], most_s: float = STILL_S) -> None:
    """Run the event loop until a condition holds.

    Args:
        condition: Looked at each millisecond.
        most_s: Seconds after which the wait fails.
    """
    async with asyncio.timeout(most_s):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def finish(
    process: "subprocess.Popen[str]", input: str | None = None, still_s: float = STILL_S
) -> tuple[str, str]:
    """Wait for the end of a program while it or a child of it works; return what it printed, and its errors.

    Args:
        process: The program, with its output piped.
        input: Its standard input.
        still_s: Seconds without work after which it is killed and the wait fails.
    """
    # Later calls of `communicate` go on with the input and the output of the first.
    inputs = iter([input])
    ended: list[tuple[str, str]] = []

    def has_ended() -> bool:
        with suppress(subprocess.TimeoutExpired):
            printed, errors = process.communicate(next(inputs, None), timeout=LOOK_S / 4)
            ended.append((printed or "", errors or ""))
        return bool(ended)

    def tree() -> list[int]:
        return [process.pid, *descendants(process.pid)]

    try:
        wait_until(has_ended, still_s, news=Work(tree), tell=lambda: process.args, every_s=0.0)
    except BaseException:
        for pid in tree():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        raise
    return ended[0]


def run(
    command: Sequence[str | Path],
    *,
    input: str | None = None,
    check: bool = False,
    cwd: str | Path | None = None,
    env: Mapping[str, str] | None = None,
    stdin: int | IO[str] | None = None,
    stderr: int | IO[str] = subprocess.PIPE,
    still_s: float = STILL_S,
) -> "subprocess.CompletedProcess[str]":
    """Run a program to its end, as `subprocess.run` does with text and piped output, for as long as it works.

    Args:
        command: The program and its arguments.
        input: Its standard input; None: that of this process.
        check: Raise `CalledProcessError` for another exit code than 0.
        cwd: Its working directory.
        env: Its environment.
        stdin: Where it reads instead of `input`.
        stderr: Where its errors go.
        still_s: Seconds without work after which it is killed and the wait fails.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.PIPE if input is not None else stdin,
        stdout=subprocess.PIPE,
        stderr=stderr,
        cwd=cwd,
        env=env,
        text=True,
    )
    printed, errors = finish(process, input, still_s)
    done = subprocess.CompletedProcess(command, process.returncode, printed, errors)
    if check:
        done.check_returncode()
    return done
