"""Rows of a ledger, read from its files."""

import io
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any, Protocol, TypeVar

from serve_app.ledger.disk import LocalDisk
from serve_app.ledger.files import JSONL, OPEN, PARQUET, day_of, lock_path, writer_of
from serve_app.ledger.parquet import NEEDS
from serve_app.ledger.remote import Remote
from serve_app.ledger.rows import Row, as_lost, decode
from serve_app.system.home import below_home


class LedgerError(Exception):
    """The ledger can't be read; the message says why."""


class Files(Protocol):
    """The part of a `Disk` that reads."""

    def read(self, path: Path) -> bytes:
        """Return the content of a file."""

    def files(self, folder: Path, pattern: str) -> list[Path]:
        """Return the files below a folder that match a pattern, in order."""

    def locked(self, path: Path) -> bool:
        """Return whether a process has the lock of a file."""


class Collector(Protocol):
    """Takes rows.

    Attributes:
        wrong: Lines that could not be read.
    """

    wrong: int

    @property
    def columns(self) -> Collection[str]:
        """Columns of a `Row` that it takes of tables."""

    def add(self, rows: Iterable[Row]) -> None:
        """Add rows."""

    def add_table(self, table: Any, day: str) -> None:
        """Add rows of an Arrow table, which has the columns.

        Args:
            table: The table.
            day: The day of all rows.
        """

    def wants(self, day: str) -> bool:
        """Return whether rows of a day are of use."""


CollectorT = TypeVar("CollectorT", bound=Collector)


def open_ledger(place: str) -> tuple[Files, Path]:
    """Return the file system of a ledger, and its folder there.

    Args:
        place: A folder or a URL.

    Raises:
        LedgerError: There is no such folder, or the URL is wrong.
        ImportError: A package for the URL is missing.
    """
    if "://" in place:
        try:
            remote = Remote(place)
        except ValueError as error:
            raise LedgerError(f"{place}: {error}") from None
        return remote, remote.root
    folder = below_home(place)
    if not folder.is_dir():
        raise LedgerError(f"{place}: there is no such folder")
    return LocalDisk(), folder


def read(files: Files, folder: Path, found: CollectorT) -> CollectorT:
    """Give the rows of a ledger to a collector, each call once.

    Args:
        files: The file system.
        folder: Folder of the ledger.
        found: The collector, which is returned.

    Raises:
        LedgerError: A package is missing, or a file isn't the ledger's.
        OSError: A file can't be read.
    """
    # Before the segments: a call that ends meanwhile is then found in both, and not in neither.
    states = _states(files, folder)
    paths = files.files(folder, "day=*/*")
    packed = {path for path in paths if path.suffix == PARQUET}
    for path in paths:
        if path.suffix not in (JSONL, PARQUET) or path.with_suffix(PARQUET) in packed - {path}:
            continue
        # The rows of a process that has left states tell which of these are settled.
        own = states.get(writer_of(path), {})
        if not own and not found.wants(day_of(path)):
            continue
        _add_segment(files, path, own, found)
    for own in states.values():
        found.add(own.values())
    return found


def _states(files: Files, folder: Path) -> dict[str, dict[str, Row]]:
    """Return the last states of running calls, by process and call."""
    found = {}
    for path in files.files(folder / OPEN, f"*{JSONL}"):
        name = writer_of(path)
        try:
            rows, _ = decode(files.read(path))
        except FileNotFoundError:
            continue
        if not files.locked(lock_path(folder, name)):
            rows = list(map(as_lost, rows))
        found[name] = {row.call: row for row in rows}
    return found


def _add_segment(files: Files, path: Path, states: dict[str, Row], found: Collector) -> None:
    try:
        content = files.read(path)
    except FileNotFoundError:
        # It has been compacted meanwhile, or is too old.
        path = path.with_suffix(PARQUET)
        try:
            content = files.read(path)
        except FileNotFoundError:
            return
    if path.suffix == JSONL:
        rows, wrong = decode(content)
        found.wrong += wrong
        for row in rows:
            states.pop(row.call, None)
        found.add(rows)
        return
    table = _table(content, path, found.columns)
    if states:
        for call in table["call"].to_pylist():
            states.pop(call, None)
    found.add_table(table, day_of(path))


def _table(content: bytes, path: Path, columns: Collection[str]) -> Any:
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError:
        raise LedgerError(f"{path}: {NEEDS}") from None
    try:
        return pq.read_table(io.BytesIO(content), columns=sorted({"call", *columns}))
    except pa.ArrowException as error:
        raise LedgerError(f"{path}: it is no Parquet file of the ledger: {error}") from None
