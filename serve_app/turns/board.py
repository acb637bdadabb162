"""Board: the entries of the engines of one machine, each in a file that the engine's processes lock."""

import fcntl
import os
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from uuid import uuid4

from msgspec import json

from serve_app.system.private_files import private_folder
from serve_app.turns.rota import Entry, Order

LOCKED = "SATURATE_TURNS_FILE"
"""Set in an Engine replica and inherited by the processes that it starts: the file of the engine's entry."""


class Board:
    """The entry of an engine beside the entries of the other engines.

    Each process of an engine holds a shared lock of the engine's file. The kernel frees the lock when the
    last of the processes ends, and with it the memory of the device. A lock of the folder orders the looks.

    Args:
        folder: The folder of the files; it is made for this user alone. None: a folder of this user that all
            services on the machine have in common.

    Attributes:
        file: The file of this engine.
    """

    def __init__(self, folder: Path | None = None) -> None:
        self._folder = folder or Path(tempfile.gettempdir(), f"saturate-{os.geteuid()}-turns")
        private_folder(self._folder)
        self.file = self._folder / uuid4().hex
        self._lock: int | None = None

    def look(self, decide: Callable[[str, Mapping[str, Entry]], Order]) -> Order | None:
        """Look at the other entries, and write the own entry, while no other engine does.

        Args:
            decide: Returns the order, by the name of this engine and the other entries. It has no effects.

        Returns:
            The order, whose entry is written; None: another engine looks just now.

        Raises:
            OSError: The files can't be read or written; the entry stays as it was.
        """
        folder = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if self._lock is None:
                self.file.touch(0o600, exist_ok=False)
                self._lock = lock(self.file)
            order = decide(self.file.name, self._others())
            # The end of a line is the end of the entry: what stands behind it is the rest of a longer one. A
            # file that somebody has deleted is not made again, since a new file would have no lock.
            with self.file.open("r+b", buffering=0) as file:
                file.write(json.encode(order.entry) + b"\n")
            return order
        except BlockingIOError:
            return None
        finally:
            os.close(folder)

    def close(self) -> None:
        """Free the lock of this process."""
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None

    def _others(self) -> dict[str, Entry]:
        """Return the entries of the other engines by their names, and delete the files of dead engines."""
        entries = {}
        for path in self._folder.iterdir():
            if path == self.file:
                continue
            with path.open("rb") as file:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    path.unlink()
                except BlockingIOError:
                    # A file is empty if its first entry could not be written.
                    if entry := file.read().partition(b"\n")[0]:
                        entries[path.name] = json.decode(entry, type=Entry)
        return entries


def lock(file: Path) -> int:
    """Hold the lock of an engine's file until this process ends, or closes the descriptor that it returns."""
    descriptor = os.open(file, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_SH)
    return descriptor


def lock_inherited() -> None:
    """Hold the lock of the engine that started this process, if it takes turns."""
    if file := os.environ.get(LOCKED):
        lock(Path(file))
