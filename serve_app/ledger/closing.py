"""Work on segments that no process writes any more: compaction, upload, and the calls of processes that died.

All of it can be done twice, by two processes too: what it makes replaces what is there, and is the same.
"""

import logging
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.ledger.disk import DRAFT, Disk
from serve_app.ledger.files import (
    JSONL,
    LOCK,
    LOST,
    OPEN,
    PARQUET,
    day_of,
    lock_path,
    lost_path,
    open_path,
    writer_of,
)
from serve_app.ledger.rows import as_lost, decode, encode

logger = logging.getLogger("ray.serve")

Upload = Callable[[Path], None]
"""Uploads a file to the same place below the ledger's URL; raises an exception where it fails."""


class Closer:
    """Brings closed segments into their last form.

    Args:
        folder: Folder of the ledger, or the spool of one that is elsewhere.
        name: Name of this process.
        disk: The file system.
        growing: Returns the segments of this process that aren't closed.
        compact: Returns a segment, JSON lines, as Parquet; None: closed segments stay JSON lines.
        upload: Uploads a closed segment, which is then removed here; None: it stays.
        keep_s: Seconds after which a segment is removed; None: never.
        clock: Seconds since the epoch.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        disk: Disk,
        *,
        growing: Callable[[], frozenset[Path]],
        compact: Callable[[bytes], bytes] | None = None,
        upload: Upload | None = None,
        keep_s: float | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._folder = folder
        self._name = name
        self._disk = disk
        self._growing = growing
        self._compact = compact
        self._upload = upload
        self._keep_s = keep_s
        self._clock = clock
        self._failed: set[Path] = set()

    def close_segments(self) -> None:
        """Compact and upload the closed segments of this process.

        Raises:
            Exception: One can't be written or uploaded; the next call goes on with it.
        """
        self._close(self._name, self._growing)

    def adopt(self) -> None:
        """Finish the work of processes that have died.

        Raises:
            Exception: A file can't be written or uploaded; the next call goes on with it.
        """
        for lock in self._disk.files(self._folder / OPEN, f"*{LOCK}"):
            name = writer_of(lock)
            if name == self._name or not self._disk.lock(lock):
                continue
            try:
                self._close_calls(name)
                self._close(name, frozenset)
            except BaseException:
                self._disk.unlock(lock, keep=True)
                raise
            self._disk.unlock(lock)

    def remove_old(self) -> None:
        """Remove the segments of days that are over for `keep_s`."""
        if self._keep_s is None:
            return
        oldest = time.strftime("%Y-%m-%d", time.gmtime(self._clock() - self._keep_s))
        for path in self._closed("*", self._growing):
            if day_of(path) < oldest:
                self._disk.remove(path)

    def spool_bytes(self) -> int:
        """Return the bytes of all segments here."""
        return sum(self._disk.size(path) for path in self._disk.files(self._folder, "day=*/*"))

    def release(self) -> None:
        """Give up the lock of this process, which has nothing left to write."""
        self._disk.unlock(lock_path(self._folder, self._name))

    def _close_calls(self, name: str) -> None:
        """Turn the running calls of a dead process into rows.

        A state of which a segment has the row was written before it. Such a segment is still JSON lines: it
        is closed only after the states were replaced.
        """
        states = open_path(self._folder, name)
        ended = set()
        for path in self._disk.files(self._folder, f"day=*/{name}.*{JSONL}"):
            if f".{LOST}." not in path.name:
                data = self._disk.read(path)
                # The crash may have left a part of a line.
                self._disk.cut(path, data.rfind(b"\n") + 1)
                ended |= {row.call for row in decode(data)[0]}
        try:
            rows, _ = decode(self._disk.read(states))
        except FileNotFoundError:
            return
        lost: dict[str, bytes] = {}
        for row in rows:
            if row.call not in ended:
                lost[row.day] = lost.get(row.day, b"") + encode(as_lost(row))
        for day, text in lost.items():
            self._disk.replace(lost_path(self._folder, day, name), text)
        self._disk.remove(states)

    def _closed(self, name: str, growing: Callable[[], frozenset[Path]]) -> list[Path]:
        """Return the closed segments of a process."""
        paths = self._disk.files(self._folder, f"day=*/{name}.*")
        # Asked for behind the files: a segment that begins meanwhile is among neither.
        still = growing()
        return [path for path in paths if path not in still]

    def _close(self, name: str, growing: Callable[[], frozenset[Path]]) -> None:
        for path in self._closed(name, growing):
            if path.name.endswith(DRAFT):
                self._disk.remove(path)
                continue
            closed = path
            if path.suffix == JSONL and self._compact is not None and path not in self._failed:
                closed = self._as_parquet(path)
            if self._upload is not None:
                self._upload(closed)
                self._disk.remove(closed)

    def _as_parquet(self, path: Path) -> Path:
        """Replace a segment by one in Parquet; return its path, or the old one if that isn't possible."""
        assert self._compact is not None
        closed = path.with_suffix(PARQUET)
        try:
            content = self._compact(self._disk.read(path))
        except ValueError as error:
            # The lines that can be read still count.
            self._failed.add(path)
            logger.error("usage ledger: %s can't be written as Parquet: %s", path, error)
            return path
        self._disk.replace(closed, content)
        self._disk.remove(path)
        return closed
