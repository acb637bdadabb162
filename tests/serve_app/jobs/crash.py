"""Crashes at failpoints: the disk as a killed process, or a loss of power, leaves it."""

import errno
import os
import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import pytest

from serve_app.jobs import failpoints
from serve_app.system.database import DatabaseError
from tests.fakes.disk import KilledError

FAULTS: dict[str, Callable[[], Exception]] = {
    "content.sync": lambda: OSError(errno.ENOSPC, "No space left on device"),
    "content.kept": lambda: OSError(errno.EIO, "Input/output error"),
    "store.commit": lambda: DatabaseError("the connection broke before the commit"),
    "store.committed": lambda: DatabaseError("the connection broke after the commit"),
}
"""Errors of writes, by the failpoint; the one after a commit doesn't tell that it took place."""

FAULT_SHARE = 0.05
"""Share of the writes that fail."""


class Crash:
    """A process that ends at the n-th failpoint.

    Synced lengths and names are noted in place of a real sync. SQLite syncs for itself at each commit.

    Args:
        folder: The folder of the batches.
        at: Number of the failpoint; None: it isn't killed.
        after: Folder that takes the state of the disk at that time.
        random: For what a loss of power leaves of bytes that weren't synced; None: the process alone ends.
        faults: For errors of the disk and the database at writes; None: there are none.
        monkeypatch: Undoes the changes.

    Attributes:
        point: The failpoint at which it ended.
        failed: The failpoints at which writes failed.
    """

    def __init__(
        self,
        folder: Path,
        at: int | None,
        after: Path,
        random: Random | None,
        faults: Random | None,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        self.point: str | None = None
        self.failed: Counter[str] = Counter()
        self._folder = folder
        self._left = at
        self._after = after
        self._random = random
        self._faults = faults
        self._lengths: dict[int, int] = {}
        self._names: set[int] = set()
        for path in folder.rglob("*"):
            self._names.add(path.stat().st_ino)
            self._lengths[path.stat().st_ino] = path.stat().st_size
        monkeypatch.setattr(failpoints, "hook", self._reach)
        monkeypatch.setattr(os, "fsync", self._fsync)

    def _reach(self, point: str) -> None:
        if self.point is None and self._left is not None:
            self._left -= 1
            if self._left <= 0:
                self.point = point
                self._copy()
        if self.point is not None:
            raise KilledError(self.point)
        if self._faults is not None and point in FAULTS and self._faults.random() < FAULT_SHARE:
            self.failed[point] += 1
            raise FAULTS[point]()

    def _fsync(self, handle: int) -> None:
        found = os.fstat(handle)
        path = Path(os.readlink(f"/proc/self/fd/{handle}"))
        if path.is_dir():
            self._names.update(entry.stat().st_ino for entry in path.iterdir())
        else:
            self._lengths[found.st_ino] = found.st_size

    def _copy(self) -> None:
        # The index of the log is memory that processes share: it goes with them.
        shutil.copytree(self._folder, self._after, ignore=shutil.ignore_patterns("*-shm"))
        if self._random is None:
            return
        for folder in ("files", "drafts"):
            for path in (self._folder / folder).glob("*"):
                self._lose(path, self._after / folder / path.name, self._random)

    def _lose(self, path: Path, copy: Path, random: Random) -> None:
        found = path.stat()
        lost = found.st_ino not in self._names and random.random() < 0.5
        if path.is_dir():
            for inner in path.iterdir():
                self._lose(inner, copy / inner.name, random)
            if lost:
                shutil.rmtree(copy)
            return
        if lost:
            copy.unlink()
            return
        stable = min(self._lengths.get(found.st_ino, 0), found.st_size)
        data = copy.read_bytes()
        rest = random.randrange(len(data) - stable + 1)
        tail = data[stable : stable + rest] if random.random() < 0.5 else random.randbytes(rest)
        copy.write_bytes(data[:stable] + tail)


async def inline(function: Any, *args: Any, **kwargs: Any) -> Any:
    """Run a function in place of a thread, so that a seed gives the same run each time."""
    return function(*args, **kwargs)
