"""The output of a run: its rows in a database beside it, and the output as an export of the database.

OUTPUT.run.db has the results of all rows, by the input file and the number of the row in the file. During a
run, a copy of each recorded line is added to OUTPUT, or for Parquet to OUTPUT.journal.jsonl, in the order in
which rows end. At the end, OUTPUT is written once, in the order of the input.
"""

import json
import os
import sqlite3
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, Literal

import sqlalchemy as sa
from pydantic_core import from_json, to_json
from sqlalchemy import Connection

from serve_app.api.protocol import JSON
from serve_app.dataset.errors import DiskError, OutputError, output_error
from serve_app.dataset.formats import InputRow, Values
from serve_app.rows.results import Results
from serve_app.rows.rows import Result
from serve_app.system.database import Database, DatabaseError, FencedError, UnusableError, open_database
from serve_app.system.disk import drafted

Existing = Literal["same", "resume", "overwrite"]
"""Handling of existing rows: continue if options and input are the same, continue anyway, or begin anew."""

VERSION = 3

GROUP_ROWS = 5_000
"""Rows in a row group of Parquet, which is held in memory."""

ROW_BITS = 40
"""Bits of a row's number within its file; the bits above are the number of the file."""

ROWS = 1 << ROW_BITS

METADATA = sa.MetaData()

RESULTS = Results(METADATA)
"""The results; each file of the input is a run of its own."""

RUN = sa.Table("run", METADATA, sa.Column("name", sa.Text(), primary_key=True), sa.Column("value", sa.Text()))
"""`options`, `input` and `totals` of the run, and whether it is `complete`."""

TOTALS = sa.select(RUN.c.value).where(RUN.c.name == "totals")

FAILING = {sqlite3.SQLITE_FULL, sqlite3.SQLITE_IOERR}
"""SQLite's errors of a disk that is full, or fails."""

NOTHING: JSON = {"rows": 0, "failed": {}, "prompt_tokens": 0, "completion_tokens": 0, "bytes": 0}
"""Totals of an output without rows."""

Reach = Callable[[str], None]
"""Called with the name of each step before the step is made; a test ends the process there."""


class Output:
    """The output of a run, new or begun by an earlier run. One process at a time may have an output open.

    Args:
        path: A `.jsonl` or `.parquet` file.
        options: Options that determine the results.
        input: Fingerprint of the input, with the names of its files as `content`.
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
        self._copy = path.with_name(f"{path.name}.journal.jsonl") if self._parquet else path
        self._state = path.with_name(f"{path.name}.run.db")
        self._files = [name for name, _ in input.get("content", [])] or [""]
        self._starts: dict[int, int] = {}
        self._lock = threading.Lock()
        self._file: int | None = None
        if existing != "overwrite" and not self._state.exists():
            for one in (path, self._copy):
                if one.exists() and one.stat().st_size:
                    raise OutputError(
                        f"{one} exists with no {self._state.name} beside it, so this command didn't write "
                        "it; name another output, or replace it with --overwrite"
                    )
        with self._translated():
            self._db = self._opened(anew=existing == "overwrite")
        self._totals = NOTHING
        try:
            with self._translated():
                self._begin({"options": options, "input": input}, existing)
                self.before: int = self._totals["rows"]
        except BaseException:
            self.close()
            raise

    def numbered(self, files: Iterable[tuple[str, Values]]) -> Iterator[InputRow]:
        """Number the rows of the input's files, by the file and the place in it.

        So the rows of a mended file, and of the files after it, keep their numbers.
        """
        start = 0
        for file, (_, values) in enumerate(files):
            self._starts[file] = start
            for line, row in enumerate(values):
                start = self._starts[file] + line + 1
                yield InputRow(file << ROW_BITS | line, row)

    def done(self, first: int, last: int) -> set[int]:
        """Return which of the rows from `first` to `last`, all of one file, are in the output."""
        file = first >> ROW_BITS << ROW_BITS
        with self._translated():
            lines = RESULTS.lines(self._db, self._files[file >> ROW_BITS], first - file, last - file)
        return {file | line for line in lines}

    def record(self, results: Sequence[Result]) -> None:
        """Add rows: all of them durably, or none.

        Raises:
            DiskError: The disk is full, or fails.
        """
        groups: dict[str, list[Result]] = {}
        for result in results:
            file, line = divmod(result.line, ROWS)
            text = _renumbered(result.text, self._starts.get(file, 0) + line)
            groups.setdefault(self._files[file], []).append(result._replace(line=line, text=text))
        with self._lock, self._translated():
            with self._db.transaction() as db:
                new = [one for group in RESULTS.add(db, groups).values() for one in group]
                lines = [_with_id(one.text) for one in new]
                totals = _added(from_json(db.execute(TOTALS).scalar_one()), new, lines)
                _note(db, totals=totals)
            self._totals = totals
            self._reach("copy")
            self._append(b"".join(lines))

    def totals(self) -> JSON:
        """Return totals of all rows, including rows of earlier runs."""
        rows, failed = self._totals["rows"], sum(self._totals["failed"].values())
        return {
            "rows": rows,
            "with_result": rows - failed,
            "failed": failed,
            "failed_by_type": dict(self._totals["failed"]),
            "prompt_tokens": self._totals["prompt_tokens"],
            "completion_tokens": self._totals["completion_tokens"],
        }

    def complete(self) -> None:
        """Bring the output into its final form: rows in the order of the input.

        Raises:
            OutputError: The disk is full, or fails. The next run continues from here.
        """
        with self._lock, self._translated():
            self._export(self.path, self._parquet, self._in_order())
            self._reach("complete")
            with self._db.transaction() as db:
                _note(db, complete=True)
            self._reach("remove")
            if self._parquet:
                self._copy.unlink(missing_ok=True)

    def close(self) -> None:
        """Close the output; further calls do nothing."""
        with self._lock:
            if self._file is not None:
                os.close(self._file)
                self._file = None
            self._db.close()

    def _opened(self, anew: bool) -> Database:
        """Return the database, opened for this process alone."""
        try:
            return self._database()
        except (DatabaseError, UnusableError) as error:
            if _code(error) == sqlite3.SQLITE_BUSY:
                message = f"{self.path}: another run is writing it; wait for it, or end it"
                raise OutputError(message) from None
            if _code(error) in FAILING:
                raise
            if not anew:
                raise OutputError(f"{error}; --overwrite begins anew") from None
        for end in ("", "-wal", "-journal"):
            self._state.with_name(f"{self._state.name}{end}").unlink(missing_ok=True)
        return self._database()

    def _database(self) -> Database:
        return open_database(self._state, "rows", METADATA, VERSION, alone=True, reach=self._reach)

    def _begin(self, run: JSON, existing: Existing) -> None:
        """Read the totals of earlier runs, and check that this run may add rows."""
        noted = {row["name"]: from_json(row["value"]) for row in self._db.rows(sa.select(RUN))}
        self._totals = noted.get("totals", NOTHING)
        differences = _differences(noted, run) if noted else []
        # The first command of a user may have a mistake. Without rows, there is nothing to protect.
        if existing == "overwrite" or (differences and not self._totals["rows"]):
            noted, differences, self._totals = {}, [], NOTHING
        if differences and existing != "resume":
            raise OutputError(
                f"{self.path} has {self._totals['rows']:,} rows of another run:\n  "
                + "\n  ".join(differences)
                + "\nName another output, begin anew with --overwrite, or keep these rows and continue "
                "with --resume"
            )
        if noted.get("complete") and not differences and self.path.exists():
            if self._parquet:
                self._copy.unlink(missing_ok=True)
            self.finished = self.totals()
            return
        with self._db.transaction() as db:
            if not noted:
                db.execute(sa.delete(RESULTS.table))
            _note(db, totals=self._totals, complete=False, **run)
        if not noted:
            self.path.unlink(missing_ok=True)
        self._open_copy()

    def _open_copy(self) -> None:
        """Open the copy to add lines. A copy of another size, after a crash for example, is written anew."""
        size = self._copy.stat().st_size if self._copy.exists() else 0
        if size != self._totals["bytes"]:
            self._export(self._copy, False, (_with_id(text) for _, _, text in self._rows()))
        self._file = os.open(self._copy, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)

    def _append(self, text: bytes) -> None:
        assert self._file is not None
        rest, end = memoryview(text), os.fstat(self._file).st_size
        try:
            while rest:
                rest = rest[os.write(self._file, rest) :]
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._file, end)
            raise output_error(self._copy, error) from None

    def _export(self, path: Path, parquet: bool, lines: Iterator[bytes]) -> None:
        with drafted(path) as draft:
            if parquet:
                _write_parquet(draft, lines)
            else:
                with draft.open("wb") as file:
                    file.writelines(lines)
            self._reach("replace")

    def _rows(self) -> Iterator[tuple[int, int, bytes]]:
        """Yield the number of a file, the number of a row in it, and the line, in the order of the input.

        Files that are no longer in the input come last.
        """
        others = sorted(RESULTS.runs(self._db) - {*self._files})
        for file, name in enumerate([*self._files, *others]):
            for line, text in RESULTS.texts(self._db, name):
                yield file, line, text

    def _in_order(self) -> Iterator[bytes]:
        """Yield the lines in the order of the input, each with the number of its row in the whole input."""
        starts = dict(self._starts)
        last = -1
        for file, line, text in self._rows():
            last = starts.setdefault(file, last + 1) + line
            yield _with_id(_renumbered(text, last))

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except (DatabaseError, FencedError, UnusableError) as error:
            if _code(error) in FAILING:
                raise DiskError(self._state, OSError(0, str(error.__cause__))) from None
            raise OutputError(str(error)) from None
        except OSError as error:
            raise output_error(self.path, error) from None


def _code(error: Exception) -> int:
    """Return SQLite's code of an error, without its variant; 0: the error isn't SQLite's."""
    return getattr(error.__cause__, "sqlite_errorcode", 0) & 0xFF


def _note(db: Connection, **values: Any) -> None:
    db.execute(sa.delete(RUN).where(RUN.c.name.in_(values)))
    rows = [{"name": name, "value": to_json(value).decode()} for name, value in values.items()]
    db.execute(sa.insert(RUN), rows)


def _added(totals: JSON, results: Sequence[Result], lines: Sequence[bytes]) -> JSON:
    """Return totals with more rows."""
    failed = Counter(from_json(one.text)["error"]["type"] for one in results if one.is_error)
    return {
        "rows": totals["rows"] + len(results),
        "failed": dict(Counter(totals["failed"]) + failed),
        "prompt_tokens": totals["prompt_tokens"] + sum(one.tokens.input_tokens for one in results),
        "completion_tokens": totals["completion_tokens"] + sum(one.tokens.output_tokens for one in results),
        "bytes": totals["bytes"] + sum(map(len, lines)),
    }


def _renumbered(text: bytes, number: int) -> bytes:
    """Return a line, which begins with the number of its row, with another number."""
    return b'{"row":%d%b' % (number, text[text.index(b",") :])


def _with_id(text: bytes) -> bytes:
    """Return a line with an id: a row without an id has its number as id."""
    head, rest = text.split(b",", 1)
    if not rest.startswith(b'"id":null'):
        return text
    return b'%b,"id":%b%b' % (head, head.removeprefix(b'{"row":'), rest.removeprefix(b'"id":null'))


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
