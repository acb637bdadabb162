"""The file system as the ledger uses it: each method is one step, which a crash may leave undone."""

import fcntl
import fnmatch
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import IO, Protocol

DRAFT = ".draft"
"""Ending of a file that is being written; a crash may leave one behind."""


class Disk(Protocol):
    """The steps; each raises an OSError where it fails."""

    def append(self, path: Path, data: bytes) -> None:
        """Write at the end of a file, which is made if missing. A failure may leave a part of the data."""

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file as a whole, or leave it as it was."""

    def cut(self, path: Path, size: int) -> None:
        """Cut a file off; one that is missing stays so."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def size(self, path: Path) -> int:
        """Return the bytes of a file; 0: there is none."""

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""

    def files(self, folder: Path, pattern: str) -> list[Path]:
        """Return the files below a folder that match a pattern, in order."""

    def lock(self, path: Path) -> bool:
        """Take the lock of a file, which is made if missing, for this process; False: another one has it."""

    def locked(self, path: Path) -> bool:
        """Return whether a process has the lock of a file."""

    def unlock(self, path: Path, *, keep: bool = False) -> None:
        """Give a lock back, and remove its file unless it is to be kept."""


class LocalDisk:
    """A directory of this machine, or one that several machines mount.

    Nothing waits for the device: a crash of a process loses nothing that was written, a loss of power may
    lose the last seconds.
    """

    def __init__(self) -> None:
        self._locks: dict[Path, IO[bytes]] = {}
        # All replicas write the prices when they start: each has drafts of its own.
        self._ending = f".{secrets.token_hex(4)}{DRAFT}"

    def append(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("ab", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def replace(self, path: Path, data: bytes) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_name(path.name + self._ending)
        try:
            draft.write_bytes(data)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise

    def cut(self, path: Path, size: int) -> None:
        with suppress(FileNotFoundError):
            os.truncate(path, size)

    def read(self, path: Path) -> bytes:
        return path.read_bytes()

    def size(self, path: Path) -> int:
        try:
            return path.stat().st_size
        except FileNotFoundError:
            return 0

    def remove(self, path: Path) -> None:
        path.unlink(missing_ok=True)

    def files(self, folder: Path, pattern: str) -> list[Path]:
        # `Path.glob` takes a folder that may not be read for an empty one.
        found = [folder]
        for part in pattern.split("/"):
            found = [one / name for one in found for name in fnmatch.filter(_names(one), part)]
        return sorted(found)

    def lock(self, path: Path) -> bool:
        path.parent.mkdir(parents=True, exist_ok=True)
        file = path.open("ab")
        try:
            # The system gives it back when the process ends, of whatever cause.
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # The process that had it may have removed the file since: nobody would see this lock.
            found = os.path.samestat(os.fstat(file.fileno()), path.stat())
        except (BlockingIOError, FileNotFoundError):
            found = False
        except OSError:
            file.close()
            raise
        if not found:
            file.close()
            return False
        self._locks[path] = file
        return True

    def locked(self, path: Path) -> bool:
        try:
            with path.open("rb") as file:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        except OSError:
            return False
        return False

    def unlock(self, path: Path, *, keep: bool = False) -> None:
        if file := self._locks.pop(path, None):
            with file:
                if not keep:
                    path.unlink(missing_ok=True)


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; none if it isn't there."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
