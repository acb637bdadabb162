"""The ledger's interface to the file system: each method is one step, which a crash may leave undone."""

import fnmatch
import os
import secrets
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from serve_app.system.private_files import make_folders

DRAFT = ".draft"
"""Ending of a file that is being written; a crash may leave such a file."""


class Disk(Protocol):
    """The steps; each raises an OSError if it fails."""

    def append(self, path: Path, data: bytes) -> None:
        """Write at the end of a file, which is created if missing. A failure may leave a part of the data."""

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file atomically."""

    def cut(self, path: Path, size: int) -> None:
        """Cut a file off; a missing file stays missing."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def size(self, path: Path) -> int:
        """Return the bytes of a file; 0: there is no file."""

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""

    def files(self, folder: Path, pattern: str) -> list[Path]:
        """Return the files below a folder that match a pattern, in order."""

    def touch(self, path: Path) -> float:
        """Set the time of a file, which is created if missing, to now; return the time, in seconds."""

    def modified(self, path: Path) -> float:
        """Return the time of a file, on the clock of `touch`; infinity: there is no file."""


class LocalDisk:
    """A directory of this machine, or a directory that several machines mount.

    Writes don't wait for the device: a crash of a process loses no written data, but a loss of power may lose
    the last seconds.
    """

    def __init__(self) -> None:
        # All replicas write the prices when they start, so each has its own drafts.
        self._ending = f".{secrets.token_hex(4)}{DRAFT}"

    def append(self, path: Path, data: bytes) -> None:
        make_folders(path.parent)
        with path.open("ab", buffering=0) as file:
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]

    def replace(self, path: Path, data: bytes) -> None:
        make_folders(path.parent)
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
        # `Path.glob` returns nothing for a folder without permission to read; this raises the error.
        found = [folder]
        for part in pattern.split("/"):
            found = [one / name for one in found for name in fnmatch.filter(_names(one), part)]
        return sorted(found)

    def touch(self, path: Path) -> float:
        make_folders(path.parent)
        path.touch()
        return path.stat().st_mtime

    def modified(self, path: Path) -> float:
        try:
            return path.stat().st_mtime
        except FileNotFoundError:
            return float("inf")


def _names(folder: Path) -> list[str]:
    """Return the names in a folder; empty if it doesn't exist."""
    try:
        return os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
