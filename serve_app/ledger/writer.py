"""The files of the ledger: rows are appended; closed segments become Parquet, are uploaded or are removed.

    day=2026-11-23/NAME.000002.jsonl    a segment: rows of the calls that ended on a day; it may grow
    day=2026-11-23/NAME.000002.parquet  the rows of a closed segment, in format parquet
    prices.json                         a copy of the config's prices

NAME is unique for each process that writes. Four times a second the rows of the calls that have ended are
appended. A process that is killed loses the rows of its last quarter of a second, or of its last round if a
round takes longer.

A process holds its growing segment by a lock of the kernel on the open file. The lock ends with the process.
A segment that nobody holds is closed. The process that closed a segment brings it into its last form. After a
kill another process does so: the next process that starts, or in the spool of a URL any process of the node.
The process holds the segment meanwhile, and removes the segment last. So each step may run again after a
kill, with the same result.
"""

import fcntl
import hashlib
import logging
import os
import re
import secrets
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO

from serve_app.ledger import prices
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.parquet import NEEDS, to_parquet
from serve_app.ledger.remote import Remote
from serve_app.ledger.rows import encode
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, UsageSettings
from serve_app.system.disk import replace_text
from serve_app.system.private_files import make_folders

logger = logging.getLogger("ray.serve")

INTERVAL_S = 0.25
"""Seconds between two rounds."""

CLOSING_S = 10.0
"""Seconds between two looks for closed segments."""

SEGMENT_BYTES = 64 << 20
"""Size at which a segment is closed."""

MAX_PENDING = 50_000
"""Maximum rows that wait while they can't be written; further rows are dropped."""

WARN_S = 60.0
"""Seconds between two warnings of the same kind."""

LAST_S = 2.0
"""Least seconds for writing the last rows of a process: a write to a network disk that is away never ends."""

DAY_S = 86_400.0

JSONL, PARQUET = ".jsonl", ".parquet"


def unique_name(replica: str) -> str:
    """Return a unique name for a process of a replica."""
    place = re.sub(r"[^A-Za-z0-9_-]+", "-", replica).strip("-") or "engine"
    return f"{place}-{secrets.token_hex(4)}"


def segment_path(folder: Path, day: str, name: str, number: int) -> Path:
    """Return the path of a segment of a process, by its number."""
    return folder / f"day={day}" / f"{name}.{number:06d}{JSONL}"


class Disk:
    """The steps of a ledger that change files: a kill may come before, after or within each step.

    Writes don't wait for the device: a crash of a process loses no written data, but a loss of power may lose
    the last seconds. Each step raises an OSError if it fails.
    """

    def append(self, file: IO[bytes], data: bytes) -> None:
        """Write at the end of an open file. A failure may leave a part of the data."""
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]

    def replace(self, path: Path, data: bytes) -> None:
        """Write a file atomically."""
        draft = path.with_suffix(".draft")
        try:
            draft.write_bytes(data)
            draft.replace(path)
        except OSError:
            with suppress(OSError):
                draft.unlink()
            raise

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        path.unlink(missing_ok=True)


def hold(file: IO[bytes]) -> bool:
    """Hold an open file until it is closed or this process ends.

    Returns:
        Whether this process holds the file now: no other process held it, and it wasn't removed.

    Raises:
        OSError: The file system has no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return os.fstat(file.fileno()).st_nlink > 0


class Segment:
    """A segment that grows, which this process holds until it closes it.

    Args:
        path: Its path; a new file.
        disk: The file system.
        now: Monotonic time, in seconds.

    Attributes:
        path: Its path.
        size: Bytes of its rows.
        began_at: Monotonic time of its begin, in seconds.

    Raises:
        OSError: The file can't be created, or another process has it already.
    """

    def __init__(self, path: Path, disk: Disk, now: float) -> None:
        self.path = path
        self.size = 0
        self.began_at = now
        self._disk = disk
        make_folders(path.parent)
        self._file = path.open("ab", buffering=0)
        try:
            held = hold(self._file)
        except OSError:
            # On a file system without locks, no process takes the segment of another process.
            held = True
        if not held:
            self._file.close()
            raise BlockingIOError(f"{path}: a process that starts has taken this new file")

    @property
    def is_there(self) -> bool:
        """Whether nobody has removed the file."""
        return os.fstat(self._file.fileno()).st_nlink > 0

    def append(self, data: bytes) -> None:
        """Append rows.

        Raises:
            OSError: No row was written.
        """
        # A failed try may have left a part of its rows, which would then be in the file twice.
        os.ftruncate(self._file.fileno(), self.size)
        self._disk.append(self._file, data)
        self.size += len(data)

    def close(self) -> None:
        """Release the segment."""
        with suppress(OSError):
            os.ftruncate(self._file.fileno(), self.size)
        self._file.close()


class Ledger:
    """The ledger of one process: the rows of its calls, and the closed segments.

    One thread calls `round`; another thread calls `close` and `remove_old`.

    Args:
        book: The calls.
        folder: Folder of the ledger, or the spool of a ledger at a URL.
        disk: The file system.
        compact: Returns the JSON lines of a segment as Parquet; None: closed segments stay JSON lines.
        upload: Uploads the content of a closed segment to a path below the URL; the segment is then removed
            here. None: segments stay.
        segment_bytes: Size at which a segment is closed.
        segment_s: Seconds after which it is closed; None: at the end of its day.
        max_bytes: Maximum bytes of segments in the folder; beyond the limit rows are dropped. None: no limit.
        keep_s: Seconds after which a segment is removed; None: never.
        max_pending: Maximum rows that wait while they can't be written; further rows are dropped.
        clock: Seconds since the epoch.
        now: Monotonic clock, in seconds.

    Attributes:
        written: Rows that were written.
        written_at: Time of the last round that succeeded, on the monotonic clock.
        full: Whether rows are dropped, since too many bytes wait for upload.
    """

    def __init__(
        self,
        book: CallBook,
        folder: Path,
        *,
        disk: Disk | None = None,
        compact: Callable[[bytes], bytes] | None = None,
        upload: Callable[[Path, bytes], None] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float | None = None,
        max_bytes: int | None = None,
        keep_s: float | None = None,
        max_pending: int = MAX_PENDING,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._folder = folder
        self._disk = disk or Disk()
        self._compact = compact
        self._upload = upload
        self._segment_bytes = segment_bytes
        self._segment_s = segment_s
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._max_pending = max_pending
        self._clock = clock
        self._now = now
        self._rounds = threading.Lock()
        self._pending: list[Call] = []
        self._growing: Segment | None = None
        self._segments = 0
        # Closed segments without their last form; at the start, all segments of the folder.
        self._closed: list[Path] = []
        self._looked = False
        self._dropped = 0
        self._warned_at = -WARN_S
        self.written = 0
        self.written_at = now()
        self.full = False
        book.keep_ended()

    @property
    def dropped(self) -> int:
        """Rows that were dropped because they could not be written for too long."""
        return self._dropped + self._book.dropped

    @property
    def behind_s(self) -> float:
        """Seconds since the last round that succeeded."""
        return self._now() - self.written_at

    # Rows

    def round(self) -> None:
        """Write the rows of the calls that have ended since the last round.

        A failure is logged; the next round tries its rows again.
        """
        with self._rounds:
            try:
                self._write()
                self._roll()
            except OSError as error:
                self._warn(f"rows of the usage ledger can't be written, and wait: {error}")
            else:
                self.written_at = self._now()

    def finish(self) -> bool:
        """Write the last rows, and close the segment; return whether the rows are written."""
        with self._rounds:
            try:
                self._write()
            except OSError as error:
                logger.warning("the last rows of the usage ledger can't be written: %s", error)
                return False
            self._let_go()
        return True

    def _write(self) -> None:
        self._take()
        days: dict[str, list[Call]] = {}
        for call in self._pending:
            days.setdefault(_day(call.time), []).append(call)
        for day, same in days.items():
            self._append(day, b"".join(encode(call.row()) for call in same))
            self.written += len(same)
            self._pending = [call for call in self._pending if _day(call.time) != day]

    def _take(self) -> None:
        ended = self._book.take()
        room = 0 if self.full else self._max_pending - len(self._pending)
        self._pending += ended[:room]
        if lost := ended[room:]:
            self._dropped += len(lost)
            self._warn(f"{self.dropped} rows of the usage ledger are dropped so far: they can't be written")

    def _append(self, day: str, data: bytes) -> None:
        """Append rows of a day.

        Raises:
            OSError: No row was written.
        """
        segment = self._growing
        if segment is None or segment.path.parent.name != f"day={day}" or not segment.is_there:
            self._let_go()
            path = segment_path(self._folder, day, self._book.name, self._segments)
            self._segments += 1
            segment = self._growing = Segment(path, self._disk, self._now())
        segment.append(data)

    def _let_go(self) -> None:
        if self._growing is not None:
            self._growing.close()
            self._closed.append(self._growing.path)
            self._growing = None

    def _roll(self) -> None:
        """Close the segment if it is large or old enough, or its day is over."""
        segment = self._growing
        if segment is None:
            return
        old = self._segment_s is not None and self._now() - segment.began_at >= self._segment_s
        over = segment.path.parent.name < f"day={_day(self._clock())}"
        if old or over or segment.size >= self._segment_bytes:
            self._let_go()

    # Segments

    def close(self) -> None:
        """Bring the segments that nobody holds into their last form.

        Raises:
            Exception: A segment can't be written or uploaded; the next call tries it again.
        """
        if self._max_bytes is not None:
            waiting = 0
            for path in self._folder.glob(f"day=*/*{JSONL}"):
                with suppress(FileNotFoundError):
                    waiting += path.stat().st_size
            self.full = waiting > self._max_bytes
            if self.full:
                self._warn(f"usage.ledger.max_spool_bytes is reached in {self._folder}: rows are dropped")
        # In a folder that many processes share, only a start looks for segments of killed processes.
        if not self._looked or self._upload is not None:
            self._closed += sorted({*self._folder.glob(f"day=*/*{JSONL}")}.difference(self._closed))
            self._looked = True
        for _ in range(len(self._closed)):
            path = self._closed.pop(0)
            try:
                self._finish(path)
            except Exception:
                self._closed.append(path)
                raise

    def _finish(self, path: Path) -> None:
        """Bring a segment into its last form, unless a process holds it."""
        if self._compact is None and self._upload is None:
            return
        try:
            # A lock on a network file system needs a file that is open for writing.
            file = path.open("r+b")
        except FileNotFoundError:
            return
        with file:
            if not hold(file):
                return
            data = file.read()
            rows = data[: data.rfind(b"\n") + 1]
            if len(rows) < len(data):
                logger.warning("usage ledger: %s ends in a part of a row, which is left out", path)
            if rows and not self._keep(path, rows):
                return
            self._disk.remove(path)

    def _keep(self, path: Path, rows: bytes) -> bool:
        """Write or upload the rows of a segment in their last form; return whether to remove it."""
        target, content = path, rows
        if self._compact is not None:
            try:
                target, content = path.with_suffix(PARQUET), self._compact(rows)
            except ValueError as error:
                # The lines that can be read still count.
                target = path
                logger.error("usage ledger: %s can't be written as Parquet: %s", path, error)
        if self._upload is not None:
            self._upload(target.relative_to(self._folder), content)
        elif target != path:
            self._disk.replace(target, content)
        return self._upload is not None or target != path

    def remove_old(self) -> None:
        """Remove the segments of days that ended more than `keep_s` ago."""
        if self._keep_s is None:
            return
        oldest = f"day={_day(self._clock() - self._keep_s)}"
        for path in self._folder.glob("day=*/*"):
            if path.parent.name < oldest:
                self._disk.remove(path)

    def _warn(self, message: str) -> None:
        if self._now() - self._warned_at >= WARN_S:
            self._warned_at = self._now()
            logger.warning("%s", message)


class Writer:
    """Writes a ledger until it is stopped, with a thread for the rows and a thread for the closed segments.

    Args:
        settings: The config's `args.usage`, with a ledger.
        book: The calls.
        disk: The file system.
        interval_s: Seconds between two rounds.
        closing_s: Seconds between two looks for closed segments.
        last_s: Least seconds for writing the last rows.

    Raises:
        SettingsError: A package that the settings need is missing.
    """

    def __init__(
        self,
        settings: UsageSettings,
        book: CallBook,
        *,
        disk: Disk | None = None,
        interval_s: float = INTERVAL_S,
        closing_s: float = CLOSING_S,
        last_s: float = LAST_S,
    ) -> None:
        assert settings.ledger is not None
        options = settings.ledger
        self._settings = settings
        self._interval_s, self._closing_s, self._last_s = interval_s, closing_s, last_s
        self._folder = _folder(options)
        self._remote = remote = _remote(options.folder)
        # A file that waits for its upload is never removed as too old.
        keep_s = None if remote or options.keep_days is None else options.keep_days * DAY_S
        self.ledger = Ledger(
            book,
            self._folder,
            disk=disk,
            compact=_compact(options),
            upload=remote.write if remote else None,
            segment_s=options.upload_s if remote else None,
            max_bytes=options.max_spool_bytes if remote else None,
            keep_s=keep_s,
        )
        self._priced = False
        self._stopping = threading.Event()
        self._threads = [
            threading.Thread(target=target, name=name, daemon=True)
            for target, name in ((self._write, "usage-ledger"), (self._close, "usage-segments"))
        ]
        self._warned_at = -WARN_S

    def start(self) -> "Writer":
        """Start the threads."""
        for thread in self._threads:
            thread.start()
        return self

    def flush(self) -> None:
        """Write the ended calls now, since the process is about to end; return even if the disk hangs."""
        _within(self._last_s, self.ledger.round)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Write the last rows, and bring the segments into their last form within the timeout.

        Args:
            timeout_s: Seconds; the next process that starts finishes the remaining segments.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        _within(max(self._last_s, deadline - time.monotonic()), self._finish)

    def _write(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self._try(self.ledger.round)

    def _close(self) -> None:
        while True:
            # Each step has its own try: on a full disk the first steps fail until old files are removed.
            for step in (self._write_prices, self.ledger.close, self.ledger.remove_old):
                self._try(step)
            if self._stopping.wait(self._closing_s):
                return

    def _try(self, step: Callable[[], object]) -> None:
        try:
            step()
        except Exception as error:
            # A step is tried again. A fault is logged with its stack, at most once in `WARN_S`.
            if time.monotonic() - self._warned_at >= WARN_S:
                self._warned_at = time.monotonic()
                fault = None if isinstance(error, OSError) else error
                logger.warning("files of the usage ledger wait: %r", error, exc_info=fault)

    def _finish(self) -> None:
        self.ledger.finish()
        self._try(self.ledger.close)

    def _write_prices(self) -> None:
        """Write the prices beside the rows, once, for readers without the config."""
        if self._settings.prices and not self._priced:
            content = prices.pack(self._settings)
            if self._remote is not None:
                self._remote.write(Path(prices.FILE), content)
            else:
                make_folders(self._folder)
                replace_text(self._folder / prices.FILE, content.decode())
            self._priced = True


def new_book(model: str, replica: str) -> CallBook:
    """Return the calls of a new process.

    Args:
        model: Id of its model; empty: it runs no model.
        replica: The replica.
    """
    return CallBook(model, replica, unique_name(replica))


def _day(seconds: float) -> str:
    # Rounded to the millisecond, like the row's time.
    return time.strftime("%Y-%m-%d", time.gmtime(round(seconds, 3)))


def _folder(options: LedgerSettings) -> Path:
    """Return the folder of the files of this node."""
    if "://" not in options.folder:
        return Path(options.folder).expanduser()
    # Services with different URLs may share a spool, and each uploads its own segments.
    name = hashlib.sha256(options.folder.encode()).hexdigest()[:16]
    return Path(options.spool).expanduser() / name


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Run a function in a thread, and wait for its end for at most `seconds`."""
    thread = threading.Thread(target=work, name="usage-last-rows", daemon=True)
    thread.start()
    thread.join(seconds)


def _remote(folder: str) -> Remote | None:
    if "://" not in folder:
        return None
    try:
        return Remote(folder)
    except (ImportError, ValueError) as error:
        raise SettingsError(f"usage.ledger.folder: {error}") from None


def _compact(options: LedgerSettings) -> Callable[[bytes], bytes] | None:
    if options.format != "parquet":
        return None
    try:
        import pyarrow  # noqa: F401
    except ImportError:
        raise SettingsError(f"usage.ledger.format: {NEEDS}, or choose jsonl") from None
    return to_parquet
