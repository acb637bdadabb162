"""The processes that this one has started, directly or through others, and how they are ended."""

import ctypes
import os
import signal
import sys
import time
from contextlib import suppress
from pathlib import Path

_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends.

    So a process that outlives the one that started it (a raylet, HAProxy) stays known, without a
    search by name that could hit someone else's.
    """
    if sys.platform.startswith("linux"):
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1)


def descendants() -> list[int]:
    """Return the ids of all processes below this one, parents first."""
    found: list[int] = []
    parents = [os.getpid()]
    while parents:
        parent = parents.pop()
        for children in Path(f"/proc/{parent}/task").glob("*/children"):
            with suppress(OSError):
                pids = [int(pid) for pid in children.read_text().split()]
                found += pids
                parents += pids
    return found


def reap() -> None:
    """Collect adopted children that have ended."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def end_descendants(grace_s: float) -> list[int]:
    """End all processes below this one: SIGTERM, and SIGKILL for what is left after `grace_s`.

    Returns:
        The ids of those that had to be ended.
    """
    ended = descendants()
    for sig, wait_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, grace_s)):
        for pid in descendants():
            with suppress(ProcessLookupError):
                os.kill(pid, sig)
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            reap()
            if not descendants():
                return ended
            time.sleep(0.05)
    return ended
