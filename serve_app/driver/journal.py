"""Append-only file of finished rows: whole lines, synced periodically, repaired after a crash."""

import fcntl
import os
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.driver.errors import OutputError
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
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.done = Spans()
        self.totals = Totals()
        self.torn = False
        # Pieces of the file with consecutive rows: the number of the first row, and its offset.
        self._firsts = array("Q")
        self._offsets = array("Q")
        self._next: int | None = None
        self._synced = True
        try:
            self._file = path.open("a+b")
        except OSError as error:
            raise OutputError(f"{path}: {error.strerror}") from None
        try:
            self._lock()
            self._end = self._recover()
        except BaseException:
            self._file.close()
            raise

    @property
    def in_order(self) -> bool:
        """True if the rows are in the order of the input."""
        return all(one < other for one, other in zip(self._firsts, self._firsts[1:], strict=False))

    def append(self, rows: Sequence[JSON]) -> None:
        """Add finished rows, in one write.

        Raises:
            OutputError: The disk is full, or fails.
        """
        text = bytearray()
        for row in rows:
            line = to_json(row) + b"\n"
            self._note(row, self._end + len(text))
            text += line
        try:
            self._file.write(text)
            self._file.flush()
        except OSError as error:
            raise OutputError(f"{self.path}: {error.strerror}") from None
        self._end += len(text)
        self._synced = False

    def sync(self) -> None:
        """Flush added rows to the disk."""
        if not self._synced:
            self._synced = True
            try:
                os.fsync(self._file.fileno())
            except OSError as error:
                raise OutputError(f"{self.path}: {error.strerror}") from None

    def close(self) -> None:
        """Sync, and close the file."""
        try:
            self.sync()
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

    def _lock(self) -> None:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            raise OutputError(f"{self.path}: another driver is writing it; wait for it, or end it") from None
        if os.fstat(self._file.fileno()).st_ino != self.path.stat().st_ino:
            raise OutputError(f"{self.path}: another driver has just finished it; run the same command again")

    def _recover(self) -> int:
        """Read the rows in the file; return the end of the last complete line."""
        end = 0
        bad = 0
        self._file.seek(0)
        for number, line in enumerate(self._file, 1):
            row = _parse(line)
            if row is None:
                bad = bad or number
                continue
            if bad or row["row"] in self.done:
                raise OutputError(
                    f"{self.path}: line {bad or number} is not what a driver wrote there; put the file "
                    "back as it was, or begin anew with --overwrite"
                )
            self._note(row, end)
            end += len(line)
        if bad:
            self.torn = True
            self._file.truncate(end)
            self._synced = False
        return end

    def _note(self, row: JSON, offset: int) -> None:
        number = row["row"]
        if not self.done.add(number):
            raise AssertionError(f"row {number} is done twice")
        if number != self._next:
            self._firsts.append(number)
            self._offsets.append(offset)
        self._next = number + 1
        self.totals.add(row)


def write_whole(path: Path, pieces: Iterator[bytes]) -> None:
    """Write a file atomically: after a crash it is complete or absent.

    Raises:
        OutputError: The disk is full, or fails.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        with draft.open("wb") as file:
            for piece in pieces:
                file.write(piece)
        put_in_place(draft, path)
    except OSError as error:
        raise OutputError(f"{path}: {error.strerror}") from None


def put_in_place(draft: Path, path: Path) -> None:
    """Rename a finished draft, durably: its content is on the disk before its name."""
    _sync(draft)
    draft.replace(path)
    _sync(path.parent)


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
