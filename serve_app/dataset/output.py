"""The output of a run: its rows as lines, and a database of the rows that are done.

The lines are OUTPUT itself, or for Parquet OUTPUT.journal.jsonl. During a run they are in the order in which
rows end. A group of rows is appended and synced, and then committed to OUTPUT.run.db with the place of each
line. So after a crash, committed lines are whole, and whole lines after them are rows that were written just
before the crash: the next start commits them. At the end the lines are put in the order of the input.
"""

import json
import os
import sqlite3
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DiskError, OutputError, output_error
from serve_app.jobs.rows import Result, RowTokens
from serve_app.system.disk import sync

Existing = Literal["same", "resume", "overwrite"]
"""Handling of existing rows: continue if options and input are the same, continue anyway, or begin anew."""

VERSION = 2

COPY_BYTES = 1 << 20

GROUP_ROWS = 5_000
"""Rows in a row group of Parquet, which is held in memory."""

SCHEMA = """
CREATE TABLE IF NOT EXISTS run (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS done (
    row INTEGER PRIMARY KEY,
    offset INTEGER NOT NULL,
    size INTEGER NOT NULL,
    error TEXT,
    prompt_tokens INTEGER NOT NULL,
    completion_tokens INTEGER NOT NULL
);
"""
"""`run` has the version, the options, the input, and the state: `running`, `ordering`, or `complete`."""

IN_ORDER = """
SELECT NOT EXISTS (
    SELECT 1 FROM (SELECT offset < LAG(offset) OVER (ORDER BY row) AS back FROM done) WHERE back
)
"""

PUT_IN_ORDER = """
UPDATE done SET offset = ordered.place
FROM (SELECT row, SUM(size) OVER (ORDER BY row) - size AS place FROM done) AS ordered
WHERE done.row = ordered.row
"""

FAILING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
"""SQLite's errors of a disk that is full, or fails."""

Reach = Callable[[str], None]
"""Called with the name of each step before the step is made; a test ends the process there."""


class Output:
    """The output of a run, new or begun by an earlier run. One process at a time may have an output open.

    Args:
        path: A `.jsonl` or `.parquet` file.
        options: Options that determine the results.
        input: Fingerprint of the input.
        existing: Handling of existing rows.
        reach: Called before each step that changes a file.

    Attributes:
        before: Number of rows of earlier runs.
        finished: Totals of an output that is complete; None if rows are left to do.

    Raises:
        OutputError: The output is in use, belongs to another run, or can't be written.
    """

    def __init__(
        self,
        path: Path,
        options: JSON,
        input: JSON,
        existing: Existing = "same",
        reach: Reach = lambda step: None,
    ) -> None:
        check_output(path)
        self.path = path
        self.finished: JSON | None = None
        self._reach = reach
        self._parquet = path.suffix == ".parquet"
        self._lines = path.with_name(f"{path.name}.journal.jsonl") if self._parquet else path
        self._draft = path.with_name(f"{path.name}.draft")
        self._state = path.with_name(f"{path.name}.run.db")
        self._lock = threading.Lock()
        self._file: int | None = None
        self._end = 0
        there = next((one for one in (path, self._lines) if one.exists() and one.stat().st_size), None)
        if there and existing != "overwrite" and not self._state.exists():
            raise OutputError(
                f"{there} exists with no {self._state.name} beside it, so this command didn't write it; "
                "name another output, or replace it with --overwrite"
            )
        self._db = self._opened(existing)
        try:
            with self._translated():
                self._begin({"options": options, "input": input}, existing)
                self.before = self._count()
        except BaseException:
            self.close()
            raise

    def done(self, first: int, last: int) -> set[int]:
        """Return which of the rows from `first` to `last` are in the output."""
        query = "SELECT row FROM done WHERE row BETWEEN ? AND ?"
        with self._lock, self._translated():
            return {row for (row,) in self._db.execute(query, (first, last))}

    def record(self, results: Sequence[Result]) -> None:
        """Add rows: all of them durably, or none.

        Raises:
            DiskError: The disk is full, or fails.
        """
        with self._lock:
            self._append(results)

    def totals(self) -> JSON:
        """Return totals of all rows, including rows of earlier runs."""
        sums = "COUNT(*), COALESCE(SUM(prompt_tokens), 0), COALESCE(SUM(completion_tokens), 0)"
        with self._lock, self._translated():
            ((rows, read, written),) = self._db.execute(f"SELECT {sums} FROM done")
            failed = dict(
                self._db.execute("SELECT error, COUNT(*) FROM done WHERE error IS NOT NULL GROUP BY error")
            )
        return {
            "rows": rows,
            "with_result": rows - sum(failed.values()),
            "failed": sum(failed.values()),
            "failed_by_type": failed,
            "prompt_tokens": read,
            "completion_tokens": written,
        }

    def complete(self) -> None:
        """Bring the output into its final form: rows in the order of the input.

        Raises:
            OutputError: The disk is full, or fails. The next run continues from here.
        """
        with self._lock, self._translated():
            if self._parquet:
                with drafted(self.path) as draft:
                    _write_parquet(draft, _split(self._pieces()))
                    self._reach("rename")
            elif not self._db.execute(IN_ORDER).fetchone()[0]:
                self._put_in_order()
            self._reach("complete")
            self._note(state="complete")
            self._reach("remove")
            if self._parquet:
                self._lines.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the output; further calls do nothing."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._db.close()

    def _opened(self, existing: Existing) -> sqlite3.Connection:
        """Return the database, opened exclusively."""
        while True:
            try:
                db = sqlite3.connect(self._state, timeout=0, isolation_level=None, check_same_thread=False)
                try:
                    # The lock is held until the connection is closed, or the process ends.
                    for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = FULL"):
                        db.execute(f"PRAGMA {pragma}")
                    db.execute("BEGIN EXCLUSIVE")
                    db.execute("COMMIT")
                    db.executescript(SCHEMA)
                except BaseException:
                    db.close()
                    raise
                return db
            except sqlite3.DatabaseError as error:
                if error.sqlite_errorcode & 0xFF in FAILING:
                    raise _database_error(self._state, error) from None
                if error.sqlite_errorcode & 0xFF == sqlite3.SQLITE_BUSY:
                    raise OutputError(
                        f"{self.path}: another run is writing it; wait for it, or end it"
                    ) from None
                if existing != "overwrite":
                    message = f"{self._state}: not the state of a run ({error}); --overwrite begins anew"
                    raise OutputError(message) from None
                self._state.unlink()

    def _begin(self, run: JSON, existing: Existing) -> None:
        """Find out which rows are done, and whether this run may add rows."""
        noted = {name: from_json(value) for name, value in self._db.execute("SELECT name, value FROM run")}
        if existing == "overwrite":
            noted = {}
        elif noted.get("version", VERSION) != VERSION:
            raise OutputError(f"{self._state}: written by another version; --overwrite begins anew")
        if noted.get("state") == "ordering":
            if self._draft.exists():
                self._draft.replace(self._lines)
            self._note(state="running")
        whole = noted.get("state") == "complete"
        if not (self.path if whole else self._lines).exists():
            noted, whole = {}, False
        differences = _differences(noted, run) if noted else []
        if noted and not whole:
            self._recover()
        if differences and not self._count():
            # The first command of a user may have a mistake. Without rows, there is nothing to protect.
            noted, differences, whole = {}, [], False
        if differences and existing != "resume":
            raise OutputError(
                f"{self.path} has {self._count():,} rows of another run:\n  "
                + "\n  ".join(differences)
                + "\nName another output, begin anew with --overwrite, or keep these rows and continue "
                "with --resume"
            )
        if differences and (reason := self._misnumbered(noted, run["input"])):
            raise OutputError(
                f"{reason}, so the rows of {self.path} have other numbers now; name another output, or begin "
                "anew with --overwrite"
            )
        if whole and self._parquet:
            self._lines.unlink(missing_ok=True)
        if whole and not differences:
            self.finished = self.totals()
        elif whole and self._parquet:
            raise OutputError(f"{self.path}: complete, nothing can be added to it; --overwrite begins anew")
        if not noted:
            self._remove()
        if self.finished is None:
            self._note(version=VERSION, state="running", files_read=None, **run)
            self._recover()

    def note_broken(self, files: int, rows: int) -> None:
        """Note where the input is broken, so that the file may be mended: later files have no rows yet.

        Args:
            files: Files that were read, with the broken file.
            rows: Rows that were read.
        """
        if not self.done(rows, sys.maxsize):
            self._note(files_read=files)

    def _misnumbered(self, noted: JSON, now: JSON) -> str:
        """Return which change of the input gives rows in the output other numbers; empty: none does.

        Rows are known by their numbers over all files. Rows and files may be added at the end.
        """
        before, after = noted["input"].get("content") or [], now.get("content") or []
        before = before[: noted.get("files_read")]
        for number, (name, size) in enumerate(before):
            found = after[number] if number < len(after) else [None, 0]
            if found[0] != name or (number + 1 < len(before) and found[1] != size):
                return f"{name} has changed, and is not the last file of the input"
        return ""

    def _remove(self) -> None:
        if self._file is not None:
            os.close(self._file)
            self._file = None
        self._db.execute("DELETE FROM done")
        self._db.execute("DELETE FROM run")
        for path in {self.path, self._lines, self._draft}:
            path.unlink(missing_ok=True)

    def _count(self) -> int:
        return int(self._db.execute("SELECT COUNT(*) FROM done").fetchone()[0])

    def _note(self, **values: Any) -> None:
        rows = [(name, to_json(value).decode()) for name, value in values.items()]
        with self._transaction():
            self._db.executemany("INSERT OR REPLACE INTO run VALUES (?, ?)", rows)

    def _recover(self) -> None:
        """Open the lines, and commit the rows after the last commit."""
        if self._file is None:
            self._file = os.open(self._lines, os.O_RDWR | os.O_CREAT, 0o666)
        end = int(self._db.execute("SELECT COALESCE(MAX(offset + size), 0) FROM done").fetchone()[0])
        if os.fstat(self._file).st_size < end or not self._is_known():
            raise OutputError(
                f"{self._lines} is not what this command wrote there; put the file back as it was, or begin "
                "anew with --overwrite"
            )
        adopted: list[Result] = []
        numbers: set[int] = set()
        bad = False
        with self._lines.open("rb") as file:
            file.seek(end)
            for line in file:
                found = None if bad else _result(line)
                if (
                    found is None
                    or found.line in numbers
                    or self._db.execute("SELECT 1 FROM done WHERE row = ?", (found.line,)).fetchone()
                ):
                    bad = True
                else:
                    numbers.add(found.line)
                    adopted.append(found)
                    continue
                if line.endswith(b"\n"):
                    count = 1 + len(adopted) + self._count()
                    raise OutputError(
                        f"{self._lines}: line {count} is not what this command wrote there; put the file "
                        "back as it was, or begin anew with --overwrite"
                    )
        self._end = end + sum(len(one.text) for one in adopted)
        os.ftruncate(self._file, self._end)
        # A killed run may have left rows that are only in the memory of this machine.
        os.fsync(self._file)
        self._commit(adopted, end)

    def _is_known(self) -> bool:
        """Return whether the last committed line is in its place."""
        last = self._db.execute("SELECT row, offset, size FROM done ORDER BY offset DESC LIMIT 1").fetchone()
        if last is None:
            return True
        row, offset, size = last
        assert self._file is not None
        found = _result(os.pread(self._file, size, offset))
        return found is not None and found.line == row

    def _append(self, results: Sequence[Result]) -> None:
        assert self._file is not None
        file, start = self._file, self._end
        text = b"".join(result.text for result in results)
        rest = memoryview(text)
        self._reach("append")
        try:
            os.lseek(file, start, os.SEEK_SET)
            while rest:
                rest = rest[os.write(file, rest) :]
            self._reach("sync")
            os.fsync(file)
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(file, start)
            raise output_error(self._lines, error) from None
        self._end = start + len(text)
        # A failed commit may have taken place. So the lines stay, and the next start commits them.
        with self._translated():
            self._commit(results, start)
        self._reach("committed")

    def _commit(self, results: Sequence[Result], start: int) -> None:
        rows = []
        for result in results:
            error = from_json(result.text)["error"]["type"] if result.is_error else None
            tokens = result.tokens
            place = (result.line, start, len(result.text))
            rows.append((*place, error, tokens.input_tokens, tokens.output_tokens))
            start += len(result.text)
        if rows:
            with self._transaction():
                self._db.executemany("INSERT INTO done VALUES (?, ?, ?, ?, ?, ?)", rows)

    def _put_in_order(self) -> None:
        with _removed_on_error(self._draft), self._draft.open("wb") as file:
            for piece in self._pieces():
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        self._reach("order")
        with self._transaction():
            self._db.execute(PUT_IN_ORDER)
            self._db.execute("INSERT OR REPLACE INTO run VALUES ('state', '\"ordering\"')")
        self._reach("replace")
        self._draft.replace(self._lines)
        sync(self._lines.parent)

    def _pieces(self) -> Iterator[bytes]:
        """Yield the lines in the order of the input, many at a time."""
        with self._lines.open("rb") as file:
            at, left = 0, 0
            for offset, size in self._db.execute("SELECT offset, size FROM done ORDER BY row"):
                if offset != at + left or left > COPY_BYTES:
                    file.seek(at)
                    yield file.read(left)
                    at, left = offset, 0
                left += size
            file.seek(at)
            yield file.read(left)

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
            self._reach("commit")
            self._db.execute("COMMIT")
        except BaseException:
            if self._db.in_transaction:
                self._db.execute("ROLLBACK")
            raise

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise _database_error(self._state, error) from None
        except OSError as error:
            raise output_error(self.path, error) from None


def _database_error(path: Path, error: sqlite3.Error) -> OutputError:
    if getattr(error, "sqlite_errorcode", 0) & 0xFF in FAILING:
        return DiskError(path, OSError(0, str(error)))
    return OutputError(f"{path}: {error}")


def check_output(path: Path) -> None:
    """Raise an OutputError if a path can't be an output."""
    if "://" in str(path) or str(path).startswith(("s3:/", "gs:/")):
        raise OutputError(f"{path}: the output has to be a local file; copy it when the run has ended")
    if path.suffix not in {".jsonl", ".parquet"}:
        raise OutputError(f"{path}: the output's name must end in .jsonl or .parquet")
    if not path.parent.is_dir():
        raise OutputError(f"{path}: there is no folder {path.parent}")


def result_columns() -> list[tuple[str, Any]]:
    """Return names and Arrow types of a result's columns."""
    import pyarrow as pa

    return [
        ("result", pa.string()),
        ("finish_reason", pa.string()),
        ("prompt_tokens", pa.int64()),
        ("completion_tokens", pa.int64()),
        ("attempts", pa.int64()),
        ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
    ]


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, and replace the file with the draft at the end, durably.

    The draft's content is synced before the draft gets the file's name. A failed draft is removed: it may
    take the space that is missing.

    Raises:
        OutputError: The file can't be written.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        with _removed_on_error(draft):
            yield draft
            sync(draft)
            draft.replace(path)
            sync(path.parent)
    except OSError as error:
        raise output_error(path, error) from None


@contextmanager
def _removed_on_error(draft: Path) -> Iterator[None]:
    try:
        yield
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def _result(line: bytes) -> Result | None:
    """Return the row in a line; None if the line isn't whole."""
    if not line.endswith(b"\n"):
        return None
    try:
        row = from_json(line)
        tokens = RowTokens(row["prompt_tokens"] or 0, 0, row["completion_tokens"] or 0)
        found = Result(row["row"], line, row["error"] is not None, tokens=tokens)
    except (ValueError, TypeError, KeyError):
        return None
    return found if isinstance(found.line, int) else None


def _split(pieces: Iterator[bytes]) -> Iterator[bytes]:
    rest = b""
    for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines


def _write_parquet(draft: Path, lines: Iterator[bytes]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    schema = pa.schema([("row", pa.int64()), ("id", pa.string()), *result_columns()])
    with pq.ParquetWriter(draft, schema) as writer:
        while group := [_flat(from_json(line)) for line in islice(lines, GROUP_ROWS)]:
            writer.write_table(pa.Table.from_pylist(group, schema=schema))


def _flat(row: JSON) -> JSON:
    """Return a row with its id as text, since a column has one type."""
    if not isinstance(row["id"], str):
        row["id"] = to_json(row["id"]).decode()
    return row


def _differences(noted: JSON, run: JSON) -> list[str]:
    """Return the differences between a run and the run of the output, a line each."""
    found = []
    before, now = noted["options"], run["options"]
    for name in dict.fromkeys([*before, *now]):
        if before.get(name) != now.get(name):
            found.append(f"{name} was {_short(before.get(name))}, is now {_short(now.get(name))}")
    if noted["input"] != run["input"]:
        found.append(f"the input has changed: {_changes(noted['input'], run['input'])}")
    return found


def _short(value: object) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _changes(was: Mapping[str, object], now: Mapping[str, object]) -> str:
    names = [name for name in dict.fromkeys([*was, *now]) if was.get(name) != now.get(name)]
    if names == ["written"]:
        return "files of the same names and sizes were written again"
    found = [
        "other content" if name in {"content", "written"} else f"{name} {was.get(name)} -> {now.get(name)}"
        for name in names
    ]
    return ", ".join(dict.fromkeys(found))
