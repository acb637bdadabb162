"""The threads that write the ledger of a replica: one for its rows, one for what closed segments need."""

import hashlib
import logging
import secrets
import threading
import time
from collections.abc import Callable
from pathlib import Path

from serve_app.ledger import prices
from serve_app.ledger.calls import CallBook
from serve_app.ledger.closing import Closer
from serve_app.ledger.disk import LocalDisk
from serve_app.ledger.files import PRICES, unique_name
from serve_app.ledger.ledger import INTERVAL_S, Ledger
from serve_app.ledger.parquet import NEEDS, to_parquet
from serve_app.ledger.remote import Remote
from serve_app.settings.schema import SettingsError
from serve_app.settings.usage import LedgerSettings, UsageSettings

logger = logging.getLogger("ray.serve")

CLOSING_S = 10.0
"""Seconds between two looks at closed segments."""

ADOPT_EVERY = 6
"""Looks after which those of processes that have died are finished too."""

WARN_S = 60.0
"""Seconds between two warnings."""

LAST_S = 2.0
"""Seconds that the last rows of a process have, at least. A network disk that is away hangs for good."""

DAY_S = 86_400.0


class Writer:
    """Writes the ledger of a replica until it is stopped.

    Args:
        settings: The config's `args.usage`; it has a ledger.
        book: The replica's calls.
        interval_s: Seconds between two rounds.
        closing_s: Seconds between two looks at closed segments.

    Raises:
        SettingsError: A package that the settings need is missing.
    """

    def __init__(
        self,
        settings: UsageSettings,
        book: CallBook,
        *,
        interval_s: float = INTERVAL_S,
        closing_s: float = CLOSING_S,
    ) -> None:
        assert settings.ledger is not None
        self._settings = settings
        self._options: LedgerSettings = settings.ledger
        self._interval_s = interval_s
        self._closing_s = closing_s
        self._remote = _remote(self._options.folder)
        self._folder = _folder(self._options)
        disk = LocalDisk()
        self._disk = disk
        self.ledger = Ledger(
            book, self._folder, disk=disk, segment_s=self._options.upload_s if self._remote else None
        )
        # A file that waits for its upload is never too old.
        keep_days = None if self._remote else self._options.keep_days
        self._closer = Closer(
            self._folder,
            book.name,
            disk,
            growing=lambda: self.ledger.segments.growing,
            compact=_compact(self._options),
            upload=None if self._remote is None else self._remote.uploader(self._folder),
            keep_s=None if keep_days is None else keep_days * DAY_S,
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
        """Write what has ended, now: the process is about to end, even if the disk hangs."""
        _within(LAST_S, self.ledger.round)

    def stop(self, timeout_s: float = 10.0) -> None:
        """Write the last rows, and bring the segments into their last form if that takes no longer.

        Args:
            timeout_s: Seconds; another process goes on with segments that are left.
        """
        if self._stopping.is_set():
            return
        self._stopping.set()
        deadline = time.monotonic() + timeout_s
        for thread in self._threads:
            if thread.is_alive():
                thread.join(max(0.0, deadline - time.monotonic()))
        _within(max(LAST_S, deadline - time.monotonic()), self._finish)

    def _write(self) -> None:
        while not self._stopping.wait(self._interval_s):
            try:
                self.ledger.round()
            except Exception:
                # With its stack, once in a while.
                self._warn_with_trace("the usage ledger fails; it is tried again")

    def _close(self) -> None:
        looks = 0
        while True:
            steps = [self._write_prices, self._closer.close_segments]
            if looks % ADOPT_EVERY == 0:
                steps += [self._closer.adopt, self._closer.remove_old]
            steps.append(self._bound)
            # Each for itself: on a full disk the first ones fail until old files are removed.
            for step in steps:
                try:
                    step()
                except OSError as error:
                    self._warn(f"segments of the usage ledger wait: {error!r}")
                except Exception:
                    # With its stack, once in a while.
                    self._warn_with_trace("segments of the usage ledger wait")
            looks += 1
            if self._stopping.wait(self._closing_s):
                return

    def _finish(self) -> None:
        written = self.ledger.finish()
        try:
            self._closer.close_segments()
            if written:
                self._closer.release()
        except Exception as error:
            message = "segments of the usage ledger are left to the next replica here: %r"
            logger.warning(message, error, exc_info=True)

    def _bound(self) -> None:
        """Take no more rows while too many bytes wait for their upload."""
        if self._remote is None:
            return
        self.ledger.segments.full = full = self._closer.spool_bytes() > self._options.max_spool_bytes
        if full:
            self._warn(f"usage.ledger.max_spool_bytes is reached in {self._folder}: new rows are dropped")

    def _write_prices(self) -> None:
        """Keep the prices beside the rows, once, for those who read them without the config."""
        if self._settings.prices and not self._priced:
            content = prices.pack(self._settings)
            if self._remote is not None:
                self._remote.write(Path(PRICES), content)
            else:
                self._disk.replace(self._folder / PRICES, content)
            self._priced = True

    def _warn(self, message: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_S:
            self._warned_at = time.monotonic()
            logger.warning("%s", message)

    def _warn_with_trace(self, message: str) -> None:
        if time.monotonic() - self._warned_at >= WARN_S:
            self._warned_at = time.monotonic()
            logger.exception("%s", message)


def start_writer(settings: UsageSettings, book: CallBook) -> Writer | None:
    """Start the writer of a replica; None: its config has no ledger.

    Raises:
        SettingsError: A package that the settings need is missing.
    """
    return Writer(settings, book).start() if settings.ledger else None


def ledger_of(writer: Writer | None) -> Ledger | None:
    """Return the ledger of a writer, if there is one."""
    return None if writer is None else writer.ledger


def new_book(model: str, replica: str) -> CallBook:
    """Return the calls of a new process.

    Args:
        model: Id of its model.
        replica: The replica.
    """
    return CallBook(model, replica, unique_name(replica, secrets.token_hex(4)))


def _folder(options: LedgerSettings) -> Path:
    """Return the folder of the files of this node."""
    if "://" not in options.folder:
        return Path(options.folder).expanduser()
    # Services with other URLs may have the same spool, and each finishes the work of its own dead processes.
    name = hashlib.sha256(options.folder.encode()).hexdigest()[:16]
    return Path(options.spool).expanduser() / name


def _within(seconds: float, work: Callable[[], None]) -> None:
    """Do something in a thread, and wait for its end for so long at most."""
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
