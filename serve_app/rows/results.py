"""The table of results: a line for each finished row of a run, until the output of the run is written.

A long line is compressed. The table is in the database of the run's state, so that one transaction changes
both.
"""

import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeVar

import sqlalchemy as sa
from sqlalchemy import Connection

from serve_app.rows.rows import Result
from serve_app.system.database import Database

T = TypeVar("T")

ASKED = 500
"""Most values in a list of a query: databases limit the parameters of a query."""

LONG_BYTES = 512
"""Bytes from which a line is compressed."""

READ_LINES = 64
"""Lines that are read at once."""

REMOVED_LINES = 1000
"""Lines that are removed in one transaction."""


class _Line(sa.types.TypeDecorator[bytes]):
    """A line of JSON, which begins with a brace; a compressed line begins with another byte."""

    impl = sa.LargeBinary
    cache_ok = True

    def process_bind_param(self, value: bytes | None, dialect: sa.Dialect) -> bytes | None:
        """Return the bytes to store."""
        return value if value is None or len(value) < LONG_BYTES else zlib.compress(value, 1)

    def process_result_value(self, value: bytes | None, dialect: sa.Dialect) -> bytes | None:
        """Return the line."""
        return value if value is None or value[:1] == b"{" else zlib.decompress(value)


class Results:
    """The results of runs in a table `results`.

    Args:
        tables: The tables of the database, to which the table is added.
    """

    def __init__(self, tables: sa.MetaData) -> None:
        self.table = sa.Table(
            "results",
            tables,
            sa.Column("batch", sa.Text(), primary_key=True),
            sa.Column("line", sa.BigInteger(), primary_key=True, autoincrement=False),
            sa.Column("is_error", sa.Boolean(), nullable=False),
            sa.Column("text", _Line(), nullable=False),
        )

    def add(self, db: Connection, results: Mapping[str, Sequence[Result]]) -> dict[str, list[Result]]:
        """Add results of runs; return the results that were not in the table.

        A commit that raised an error may have taken place, so the same results may come again.

        Args:
            db: The transaction.
            results: Results of different rows, by run.
        """
        table = self.table
        key = sa.tuple_(table.c.batch, table.c.line)
        found: set[tuple[str, int]] = set()
        for some in slices([(run, one.line) for run, group in results.items() for one in group]):
            rows = db.execute(sa.select(table.c.batch, table.c.line).where(key.in_(some)))
            found |= {(row.batch, row.line) for row in rows}
        new = {run: [one for one in group if (run, one.line) not in found] for run, group in results.items()}
        new = {run: group for run, group in new.items() if group}
        values = [
            {"batch": run, "line": one.line, "is_error": one.is_error, "text": one.text}
            for run, group in new.items()
            for one in group
        ]
        if values:
            db.execute(sa.insert(table), values)
        return new

    def lines(self, database: Database, run: str, first: int, last: int) -> set[int]:
        """Return which of the lines of a run from `first` to `last` have a result."""
        line = self.table.c.line
        query = sa.select(line).where(self.table.c.batch == run, line.between(first, last))
        return {row["line"] for row in database.rows(query)}

    def texts(
        self, database: Database, run: str, is_error: bool | None = None
    ) -> Iterator[tuple[int, bytes]]:
        """Yield the numbers and the texts of the lines of a run, in the order of the input.

        Args:
            database: The database.
            run: The run.
            is_error: Whether errors are yielded, or results; None: both.
        """
        table = self.table
        query = sa.select(table.c.line, table.c.text).order_by(table.c.line).limit(READ_LINES)
        query = query.where(table.c.batch == run, table.c.line > sa.bindparam("at"))
        if is_error is not None:
            query = query.where(table.c.is_error == is_error)
        at = -1
        while rows := database.rows(query, {"at": at}):
            yield from ((row["line"], row["text"]) for row in rows)
            at = rows[-1]["line"]

    def runs(self, database: Database) -> set[str]:
        """Return the runs that have results."""
        return {row["batch"] for row in database.rows(sa.select(self.table.c.batch).distinct())}

    def remove(self, database: Database, run: str) -> None:
        """Remove the results of a run, in short transactions: other writers wait for each transaction."""
        table = self.table
        lines = sa.select(table.c.line).where(table.c.batch == run).limit(REMOVED_LINES)
        query = sa.delete(table).where(table.c.batch == run, table.c.line.in_(lines.scalar_subquery()))
        removed = REMOVED_LINES
        while removed == REMOVED_LINES:
            with database.transaction() as db:
                removed = db.execute(query).rowcount


def slices(items: Sequence[T]) -> Iterable[Sequence[T]]:
    """Return parts of a list that are short enough for a query."""
    return (items[start : start + ASKED] for start in range(0, len(items), ASKED))
