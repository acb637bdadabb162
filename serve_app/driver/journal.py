"""Append-only file of finished rows: whole lines, synced periodically, repaired after a crash."""

import fcntl
import os
from array import array
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DiskError, OutputError, output_error
from serve_app.driver.run_stats import Totals
from serve_app.driver.spans import Spans

COPY_BYTES = 1 << 20


class Journal:
    """An output file that is being written. Rows are in the order in which they finished, with their numbers.

    One process at a time may have it open.

    Args:
        path: The file; it is created if missing. An incomplete last line is cut off.

    Attributes:
        done: Numbers of the rows in it.
        totals: Totals of these rows.
        torn: Whether an incomplete line was cut off.

    Raises:
        OutputError: Another process has the file open, or its content isn't rows.
        DiskError: The disk fails.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.torn = False
        # The first failure of the disk: nothing is written after it. The kernel reports the failure of a sync
        # once, and the next sync would seem to succeed.
        self._write_error: DiskError | None = None
        self._sync_error: DiskError | None = None
        try:
            # Without a buffer, which would keep what a full disk didn't take, and write it later.
            self._file = path.open("ab", buffering=0)
        except OSError as error:
            raise output_error(path, error) from None
        try:
            self._lock()
            self._recover()
            # A run that was killed may have left rows that only the memory of this machine has.
            self._synced_end = 0
            self.sync()
        except BaseException:
            self._file.close()
            raise

    @property
    def in_order(self) -> bool:
        """True if the rows are in the order of the input."""
        return all(one < other for one, other in zip(self._firsts, self._firsts[1:], strict=False))

    def append(self, rows: Sequence[JSON]) -> None:
        """Add finished rows: all of them, or none if the disk fails.

        Raises:
            DiskError: The disk is full, or fails.
        """
        if error := self._write_error or self._sync_error:
            raise error
        for row in rows:
            if row["row"] in self.done:
                raise AssertionError(f"row {row['row']} is done twice")
        # NaN and Infinity are no JSON.
        lines = [to_json(row, inf_nan_mode="null") + b"\n" for row in rows]
        self._write(b"".join(lines))
        for row, line in zip(rows, lines, strict=True):
            self._note(row, self._end)
            self._end += len(line)

    def sync(self) -> None:
        """Flush added rows to the disk. Another thread may do it.

        Raises:
            DiskError: The disk is full, or fails: rows since the last sync may be lost.
        """
        if self._sync_error:
            raise self._sync_error
        end = self._end
        if end == self._synced_end:
            return
        try:
            os.fsync(self._file.fileno())
        except OSError as error:
            self._sync_error = DiskError(self.path, error)
            raise self._sync_error from None
        self._synced_end = end

    def close(self) -> None:
        """Sync, and close the file. If the disk fails, rows that it may not have are cut off.

        Raises:
            DiskError: The disk is full, or fails.
        """
        try:
            self.sync()
        except DiskError:
            with suppress(OSError):
                os.ftruncate(self._file.fileno(), self._synced_end)
            with suppress(OSError, OutputError):
                self._recover()
            raise
        finally:
            self._file.close()

    def pieces(self) -> Iterator[bytes]:
        """Yield the lines in the order of the input, many at a time."""
        order = sorted(range(len(self._firsts)), key=self._firsts.__getitem__)
        with self.path.open("rb") as file:
            for index in order:
                start = self._offsets[index]
                end = self._offsets[index + 1] if index + 1 < len(self._offsets) else self._end
                file.seek(start)
                while start < end:
                    piece = file.read(min(COPY_BYTES, end - start))
                    start += len(piece)
                    yield piece

    def put_in_order(self) -> None:
        """Atomically replace the file by one with the rows in the order of the input."""
        self.sync()
        if not self.in_order:
            write_whole(self.path, self.pieces())

    def _write(self, text: bytes) -> None:
        """Write text at the end of the file, or nothing of it if the disk fails."""
        rest = memoryview(text)
        handle = self._file.fileno()
        try:
            while rest:
                rest = rest[os.write(handle, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(handle, self._end)
            self._write_error = DiskError(self.path, error)
            raise self._write_error from None

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{self.path}: another driver is writing it; wait for it, or end it") from None
        if os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
            raise OutputError(f"{self.path}: another driver has just finished it; run the same command again")

    def _recover(self) -> None:
        """Read the rows in the file, up to the end of the last complete line."""
        self.done = Spans()
        self.totals = Totals()
        # Pieces of the file with consecutive rows: the number of the first row, and its offset.
        self._firsts = array("Q")
        self._offsets = array("Q")
        self._next: int | None = None
        self._end = 0
        bad = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                row = _parse(line)
                if row is None:
                    bad = bad or number
                    continue
                if bad or row["row"] in self.done:
                    raise OutputError(
                        f"{self.path}: line {bad or number} is not what a driver wrote there; put the file "
                        "back as it was, or begin anew with --overwrite"
                    )
                self._note(row, self._end)
                self._end += len(line)
        if bad:
            self.torn = True
            os.ftruncate(self._file.fileno(), self._end)

    def _note(self, row: JSON, offset: int) -> None:
        number = row["row"]
        self.done.add(number)
        if number != self._next:
            self._firsts.append(number)
            self._offsets.append(offset)
        self._next = number + 1
        self.totals.add(row)


def write_whole(path: Path, pieces: Iterator[bytes]) -> None:
    """Write a file atomically: after a crash it is complete or absent.

    Raises:
        OutputError: The file can't be written.
    """
    with drafted(path) as draft, draft.open("wb") as file:
        for piece in pieces:
            file.write(piece)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Give the path of a draft, and put it in the file's place at the end, durably.

    Its content is on the disk before its name. A draft that failed is removed: it may take the space that is
    missing.

    Raises:
        OutputError: The file can't be written.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        yield draft
        _sync(draft)
        draft.replace(path)
        _sync(path.parent)
    except OSError as error:
        with suppress(OSError):
            draft.unlink()
        raise output_error(path, error) from None


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _parse(line: bytes) -> JSON | None:
    """Return the row in a line; None if the line isn't a whole one."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = from_json(line)
    except ValueError:
        return None
    is_row = isinstance(row, dict) and isinstance(row.get("row"), int) and "error" in row
    return row if is_row else None
