"""The background writer of the ledger: the rows of one Engine replica, at most a second behind.

Each half second it appends the rows of the calls that have ended to the segment of their day, and then
replaces the file with the state of those that run. So a crash leaves every call in one of the two, or in
both: a row of a segment counts, a state only where there is no row. What came after the last round is lost.
"""

import logging
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.disk import Disk, LocalDisk
from serve_app.ledger.files import lock_path, open_path, segment_path
from serve_app.ledger.rows import Row, encode

logger = logging.getLogger("ray.serve")

INTERVAL_S = 0.5
"""Seconds between two rounds: a round that takes as long again still keeps the bound of a second."""

SEGMENT_BYTES = 64 << 20
"""Size from which on a segment is closed."""

MAX_PENDING = 50_000
"""Rows that wait while they can't be written; more are dropped."""

MAX_STATES = 5_000
"""Most of these that are written with the running calls meanwhile."""

WARN_S = 60.0
"""Seconds between two warnings of the same kind."""


class Segments:
    """The growing segments of one process.

    Args:
        folder: Folder of the ledger.
        name: Unique name of the process.
        disk: The file system.
        segment_bytes: Size from which on a segment is closed.
        segment_s: Seconds after which it is closed; None: at the end of its day.

    Attributes:
        growing: The segments that aren't closed. Several, while the state of the running calls is older than
            the rows in them.
        full: No more rows are taken: too many wait for their upload.
    """

    def __init__(
        self,
        folder: Path,
        name: str,
        disk: Disk,
        *,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float | None = None,
    ) -> None:
        self.growing: frozenset[Path] = frozenset()
        self.full = False
        self._folder = folder
        self._name = name
        self._disk = disk
        self._segment_bytes = segment_bytes
        self._segment_s = segment_s
        self._current: Path | None = None
        self._day = ""
        self._size = 0
        self._number = 0
        self._began_at = 0.0
        self._torn = False

    def append(self, day: str, data: bytes, now: float) -> None:
        """Append rows of a day.

        Args:
            day: The day.
            data: The rows.
            now: Monotonic time, in seconds.

        Raises:
            OSError: None of them was written.
        """
        if self._current is not None and self._torn:
            self._disk.cut(self._current, self._size)
            self._torn = False
        if self._current is None or day != self._day:
            self._current = segment_path(self._folder, day, self._name, self._number)
            self._number += 1
            self._day, self._size, self._began_at = day, 0, now
            self.growing |= {self._current}
        try:
            self._disk.append(self._current, data)
        except OSError:
            # A part may be written, and is to go before the next try: else its rows were there twice.
            self._torn = True
            raise
        self._size += len(data)

    def roll(self, now: float, today: str) -> None:
        """Close the segments before the current one, and this one if it is large or old enough.

        All rows are written, and the state of the running calls behind them.
        """
        if self._current is None:
            return
        old = self._segment_s is not None and now - self._began_at >= self._segment_s
        if old or self._size >= self._segment_bytes or self._day < today:
            self.close()
        else:
            self.growing = frozenset({self._current})

    def close(self) -> None:
        """Close the segments; the next row begins another."""
        self._current = None
        self.growing = frozenset()


class Ledger:
    """Writes the rows of a replica's calls.

    Args:
        book: The calls.
        folder: Folder of the ledger, or the spool of one that is elsewhere.
        disk: The file system.
        clock: Seconds since the epoch.
        now: Monotonic clock, in seconds.
        segment_bytes: See `Segments`.
        segment_s: See `Segments`.

    Attributes:
        segments: The growing segments.
        written: Rows that were written.
        written_at: Time of the last round that succeeded, on the monotonic clock.
    """

    def __init__(
        self,
        book: CallBook,
        folder: Path,
        *,
        disk: Disk | None = None,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float | None = None,
    ) -> None:
        self._book = book
        self._disk = disk or LocalDisk()
        self._clock = clock
        self._now = now
        self._open = open_path(folder, book.name)
        self._lock = lock_path(folder, book.name)
        self._pending: list[Row] = []
        self._states = b""
        self._locked = False
        self._warned_at = -WARN_S
        self._dropped = 0
        self._rounds = threading.Lock()
        self.segments = Segments(
            folder, book.name, self._disk, segment_bytes=segment_bytes, segment_s=segment_s
        )
        self.written = 0
        self.written_at = now()
        book.keep_ended()

    @property
    def dropped(self) -> int:
        """Rows that were dropped: they could not be written for too long."""
        return self._dropped + self._book.dropped

    @property
    def behind_s(self) -> float:
        """Seconds since the last round that succeeded."""
        return self._now() - self.written_at

    def round(self) -> None:
        """Write what has ended since the last round, and the state of what runs.

        A failure is logged; its rows are tried again in the next round.
        """
        with self._rounds:
            running, ended = self._book.take()
            now = self._clock()
            self._take(ended, now)
            states = [call.row(now) for call in running]
            try:
                self._hold_lock()
                try:
                    self._append()
                finally:
                    # Rows that could not be appended are as safe here.
                    self._replace(states + self._pending[:MAX_STATES])
            except OSError as error:
                self._warn(f"rows of the usage ledger can't be written, and wait: {error}")
            else:
                self.written_at = self._now()
                self.segments.roll(self._now(), _today(now))

    def finish(self) -> bool:
        """Write the last rows: calls that run now are lost with the process. Leave the rest in order.

        Returns:
            Whether they are written; if not, another process has to finish the work of this one.
        """
        with self._rounds:
            running, ended = self._book.take()
            now = self._clock()
            self._take(ended, now)
            self._pending += [call.row(now, "lost") for call in running]
            try:
                self._hold_lock()
                self._append()
                self._disk.remove(self._open)
                self.segments.close()
            except OSError as error:
                logger.warning("the last rows of the usage ledger can't be written: %s", error)
                return False
        return True

    def _hold_lock(self) -> None:
        """Take the lock that tells other processes that this one lives.

        Raises:
            OSError: The file system has none, or a process that looks for the work of dead ones has it.
        """
        if not self._locked and not self._disk.lock(self._lock):
            # That one would take rows of this process for those of a dead one.
            raise BlockingIOError(f"another process has {self._lock}")
        self._locked = True

    def _take(self, ended: list[Call], now: float) -> None:
        room = 0 if self.segments.full else MAX_PENDING - len(self._pending)
        self._pending += [call.row(now) for call in ended[:room]]
        if lost := len(ended[room:]):
            self._dropped += lost
            self._warn(f"{self.dropped} rows of the usage ledger are dropped so far: they can't be written")

    def _append(self) -> None:
        days: dict[int, list[Row]] = {}
        for row in self._pending:
            days.setdefault(row.time.toordinal(), []).append(row)
        for day, same in days.items():
            self.segments.append(same[0].day, b"".join(map(encode, same)), self._now())
            self.written += len(same)
            self._pending = [row for row in self._pending if row.time.toordinal() != day]

    def _replace(self, running: list[Row]) -> None:
        states = b"".join(map(encode, running))
        # An idle replica writes nothing.
        if states != self._states:
            self._disk.replace(self._open, states)
            self._states = states

    def _warn(self, message: str) -> None:
        if self._now() - self._warned_at >= WARN_S:
            self._warned_at = self._now()
            logger.warning("%s", message)


def _today(now: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(now))
