"""The files of the ledger: rows are appended; closed segments become Parquet, are uploaded or are removed.

    day=2026-11-23/NAME.000004711.jsonl    a segment: rows of the calls that ended on a day; it may grow
    day=2026-11-23/NAME.000000000.parquet  the rows of a closed segment, in format parquet
    prices.json                            a copy of the config's prices

NAME is unique for each process that writes; the number counts the process's rows before the segment. Four
times a second the rows of the calls that have ended are appended. A process that is killed loses the rows of
its last quarter of a second, or of its last round if a round takes longer.

A process touches its newest segment every few seconds. Segments without a touch for a minute belong to a
process that has died: any other process brings them into their last form. Each of these steps may run twice,
also in two processes: the result is the same, and replaces the earlier result.
"""

import hashlib
import logging
import re
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.ledger import prices
from serve_app.ledger.calls import Call, CallBook
from serve_app.ledger.disk import DRAFT, Disk, LocalDisk
from serve_app.ledger.parquet import NEEDS, to_parquet
from serve_app.ledger.remote import Remote
from serve_app.ledger.rows import encode
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, UsageSettings

logger = logging.getLogger("ray.serve")

INTERVAL_S = 0.25
"""Seconds between two rounds."""

CLOSING_S = 10.0
"""Seconds between two checks for closed segments."""

ADOPT_EVERY = 3
"""Number of checks after which the segments of processes that have died are finished too."""

TOUCH_S = 5.0
"""Seconds between two touches of the newest segment."""

ORPHANED_S = 60.0
"""Seconds without a touch after which a process counts as dead."""

SEGMENT_BYTES = 64 << 20
"""Size at which a segment is closed."""

MAX_PENDING = 50_000
"""Most rows that wait while they can't be written; further rows are dropped."""

WARN_S = 60.0
"""Seconds between two warnings of the same kind."""

LAST_S = 2.0
"""Least seconds for writing the last rows of a process. A network disk that is away hangs forever."""

DAY_S = 86_400.0

JSONL, PARQUET = ".jsonl", ".parquet"


def unique_name(replica: str) -> str:
    """Return a unique name for a process of a replica."""
    place = re.sub(r"[^A-Za-z0-9_-]+", "-", replica).strip("-") or "engine"
    return f"{place}-{secrets.token_hex(4)}"


def segment_path(folder: Path, day: str, name: str, number: int) -> Path:
    """Return the path of a segment whose first row has the number."""
    return folder / f"day={day}" / f"{name}.{number:09d}{JSONL}"


def _name_of(path: Path) -> str:
    return path.name.partition(".")[0]


class Ledger:
    """The ledger of one process: the rows of its calls, and the closed segments.

    One thread calls `round`; another thread calls `close`, `adopt` and `remove_old`.

    Args:
        book: The calls.
        folder: Folder of the ledger, or the spool of a ledger at a URL.
        disk: The file system.
        compact: Returns a segment, JSON lines, as Parquet; None: closed segments stay JSON lines.
        upload: Uploads a closed segment, which is then removed here; None: segments stay.
        segment_bytes: Size at which a segment is closed.
        segment_s: Seconds after which it is closed; None: at the end of its day.
        max_bytes: Most bytes of segments here; beyond the limit rows are dropped. None: no bound.
        keep_s: Seconds after which a segment is removed; None: never.
        clock: Seconds since the epoch.
        now: Monotonic clock, in seconds.

    Attributes:
        written: Rows that were written.
        written_at: Time of the last round that succeeded, on the monotonic clock.
        full: Rows are dropped, since too many bytes wait for upload.
    """

    def __init__(
        self,
        book: CallBook,
        folder: Path,
        *,
        disk: Disk | None = None,
        compact: Callable[[bytes], bytes] | None = None,
        upload: Callable[[Path], None] | None = None,
        segment_bytes: int = SEGMENT_BYTES,
        segment_s: float | None = None,
        max_bytes: int | None = None,
        keep_s: float | None = None,
        clock: Callable[[], float] = time.time,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._book = book
        self._folder = folder
        self._disk = disk or LocalDisk()
        self._compact = compact
        self._upload = upload
        self._segment_bytes = segment_bytes
        self._segment_s = segment_s
        self._max_bytes = max_bytes
        self._keep_s = keep_s
        self._clock = clock
        self._now = now
        self._rounds = threading.Lock()
        self._pending: list[Call] = []
        self._growing: Path | None = None
        self._newest: Path | None = None
        self._size = 0
        self._began_at = 0.0
        self._torn = False
        self._touched_at = now()
        self._dropped = 0
        self._warned_at = -WARN_S
        self._failed: set[Path] = set()
        self._adopted: set[str] = set()
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
                self._touch()
                self._roll()
            except OSError as error:
                self._warn(f"rows of the usage ledger can't be written, and wait: {error}")
            else:
                self.written_at = self._now()

    def finish(self) -> bool:
        """Write the last rows, and close the segment; return whether both succeeded."""
        with self._rounds:
            try:
                self._write()
            except OSError as error:
                logger.warning("the last rows of the usage ledger can't be written: %s", error)
                return False
            self._growing = None
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
        room = 0 if self.full else MAX_PENDING - len(self._pending)
        self._pending += ended[:room]
        if lost := ended[room:]:
            self._dropped += len(lost)
            self._warn(f"{self.dropped} rows of the usage ledger are dropped so far: they can't be written")

    def _append(self, day: str, data: bytes) -> None:
        """Append rows of a day.

        Raises:
            OSError: No row was written.
        """
        path = self._growing
        if path is not None and self._torn:
            self._disk.cut(path, self._size)
            self._torn = False
        # A process that has stood still for a minute counts as dead, and others have taken its segment.
        if path is None or path.parent.name != f"day={day}" or self._disk.size(path) != self._size:
            path = self._growing = self._newest = segment_path(
                self._folder, day, self._book.name, self.written
            )
            self._size, self._began_at = 0, self._now()
        try:
            self._disk.append(path, data)
        except OSError:
            # A part may be written, and must be cut off before the next try, or its rows would be there
            # twice.
            self._torn = True
            raise
        self._size += len(data)

    def _touch(self) -> None:
        """Touch the newest segment, so that other processes don't take it."""
        if self._newest is not None and self._now() - self._touched_at >= TOUCH_S:
            self._touched_at = self._now()
            if self._disk.size(self._newest):
                self._disk.touch(self._newest)

    def _roll(self) -> None:
        """Close the segment if it is large or old enough, or its day is over."""
        if self._growing is None:
            return
        old = self._segment_s is not None and self._now() - self._began_at >= self._segment_s
        over = self._growing.parent.name < f"day={_day(self._clock())}"
        if old or over or self._size >= self._segment_bytes:
            self._growing = None

    # Segments

    def close(self) -> None:
        """Bring the closed segments of this process into their last form.

        Raises:
            Exception: A segment can't be written or uploaded; the next call tries it again.
        """
        self._close(self._book.name)
        if self._max_bytes is not None:
            waiting = sum(self._disk.size(path) for path in self._disk.files(self._folder, "day=*/*"))
            self.full = waiting > self._max_bytes
            if self.full:
                self._warn(f"usage.ledger.max_spool_bytes is reached in {self._folder}: rows are dropped")

    def adopt(self) -> None:
        """Finish the work of processes that have died.

        Raises:
            Exception: A file can't be written or uploaded; the next call tries it again.
        """
        found: dict[str, list[Path]] = {}
        for path in self._recent():
            if path.suffix == JSONL:
                found.setdefault(_name_of(path), []).append(path)
        now = self._disk.touch(self._folder / ".now")
        for name, paths in found.items():
            if name == self._book.name or name in self._adopted:
                continue
            if now - max(map(self._disk.modified, paths)) < ORPHANED_S:
                continue
            for path in paths:
                # The crash may have left a part of a line.
                self._disk.cut(path, self._disk.read(path).rfind(b"\n") + 1)
            self._close(name)
            self._adopted.add(name)

    def remove_old(self) -> None:
        """Remove the segments of days that ended more than `keep_s` ago."""
        if self._keep_s is None:
            return
        oldest = f"day={_day(self._clock() - self._keep_s)}"
        for folder in self._disk.files(self._folder, "day=*"):
            if folder.name < oldest:
                for path in self._disk.files(folder, "*"):
                    if path != self._growing:
                        self._disk.remove(path)

    def _recent(self) -> list[Path]:
        """Return the files that may be unfinished: all files in a spool, otherwise the files of two days."""
        if self._upload is not None:
            return self._disk.files(self._folder, "day=*/*")
        days = [_day(self._clock() - DAY_S * back) for back in (1, 0)]
        return [path for day in days for path in self._disk.files(self._folder, f"day={day}/*")]

    def _close(self, name: str) -> None:
        for path in self._recent():
            if _name_of(path) != name or path == self._growing:
                continue
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
        """Replace a segment by a Parquet file; return its path, or the segment's path if that fails."""
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

    def _warn(self, message: str) -> None:
        if self._now() - self._warned_at >= WARN_S:
            self._warned_at = self._now()
            logger.warning("%s", message)


class Writer:
    """Writes a ledger until it is stopped, with a thread for the rows and a thread for the closed segments.

    Args:
        settings: The config's `args.usage`; it has a ledger.
        book: The calls.
        disk: The file system.
        interval_s: Seconds between two rounds.
        closing_s: Seconds between two checks for closed segments.
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
        self._disk = disk or LocalDisk()
        self._remote = remote = _remote(options.folder)
        # A file that waits for its upload is never removed as too old.
        keep_s = None if remote or options.keep_days is None else options.keep_days * DAY_S
        self.ledger = Ledger(
            book,
            self._folder,
            disk=self._disk,
            compact=_compact(options),
            upload=remote.uploader(self._folder) if remote else None,
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
            timeout_s: Seconds; another process finishes the remaining segments.
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
        looks = 0
        while True:
            steps = [self._write_prices, self.ledger.close]
            if looks % ADOPT_EVERY == 0:
                steps += [self.ledger.adopt, self.ledger.remove_old]
            # Each step has its own try: on a full disk the first steps fail until old files are removed.
            for step in steps:
                self._try(step)
            looks += 1
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
                self._disk.replace(self._folder / prices.FILE, content)
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
    # Services with different URLs may share a spool, and each finishes the work of its own dead processes.
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
