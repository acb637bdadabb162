"""Descendants of this process: finding them, collecting their exit codes, ending them."""

import ctypes
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import psutil

KILL_S = 5.0
"""Seconds in which the kernel removes a killed process; a process that waits for a device may take longer."""

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant that loses its own parent.

    So a process that outlives its parent (a raylet, HAProxy) stays a descendant. A search by name could match
    processes of other programs.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants(*roots: int) -> list[int]:
    """Return the ids of all descendants of some processes, parents first; default: of this process."""
    found: list[int] = []
    for root in roots or (os.getpid(),):
        with suppress(psutil.Error):
            found += [child.pid for child in psutil.Process(root).children(recursive=True)]
    return found


def reap() -> dict[int, int]:
    """Collect the children that have ended, adopted children too.

    Returns:
        Exit codes by process id; a process that a signal ended has the negative signal number.
    """
    codes = {}
    with suppress(ChildProcessError):
        while (found := os.waitpid(-1, os.WNOHANG))[0]:
            codes[found[0]] = os.waitstatus_to_exitcode(found[1])
    return codes


def end_descendants(grace_s: float) -> list[int]:
    """End all descendants of this process: SIGTERM, then SIGKILL after `grace_s` seconds.

    Returns:
        The ids of the processes that were ended.
    """

    def living() -> list[int]:
        reap()
        return descendants()

    return end_all(living, grace_s)


def end_all(living: Callable[[], list[int]], grace_s: float) -> list[int]:
    """End processes: SIGTERM, then SIGKILL after `grace_s` seconds.

    Args:
        living: Returns the ids of the live processes; a process may still start children while it ends.
        grace_s: Seconds between the signals.

    Returns:
        The ids of the processes that were ended.
    """
    ended: dict[int, None] = {}
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_S)):
        told: set[int] = set()
        deadline = time.monotonic() + wait_s
        while left := living():
            for pid in set(left) - told:
                with suppress(ProcessLookupError):
                    os.kill(pid, sig)
            told.update(left)
            ended |= dict.fromkeys(left)
            if time.monotonic() >= deadline:
                break
            time.sleep(0.02)
    return list(ended)


def start_time(pid: int) -> int | None:
    """Return when a process started, in clock ticks since boot; None if there is no such process.

    The kernel reuses ids; the pair of id and start time is unique.
    """
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    # The second field is the program's name in parentheses, which may hold spaces and parentheses.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else int(fields[18])


def environment(pid: int) -> dict[str, str]:
    """Return the initial environment of a process; empty if it can't be read."""
    try:
        return psutil.Process(pid).environ()
    except psutil.Error:
        return {}


class Listener(NamedTuple):
    """A process that listens on a port.

    Attributes:
        pid: Process id.
        name: Name of the program.
    """

    pid: int
    name: str


def listeners(port: int) -> list[Listener]:
    """Return the processes that listen on a TCP port, as far as this user may see them."""
    found = set()
    for one in psutil.net_connections("tcp"):
        here = one.laddr.port if one.laddr else None
        if one.status == psutil.CONN_LISTEN and here == port and one.pid is not None:
            # The process may have ended.
            with suppress(psutil.Error):
                found.add(Listener(one.pid, psutil.Process(one.pid).name()))
    return sorted(found)
