"""The databases that may hold the state, behind one interface; this one is SQLite."""

import fcntl
import sqlite3
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, Protocol

from serve_app.jobs.errors import DatabaseError, HeldError
from serve_app.jobs.failpoints import reach

Row = Mapping[str, Any]
"""A row of a table, by the names of its columns."""


class Transaction(Protocol):
    """A transaction that is open. Arguments stand for the `?` in a query."""

    def rows(self, query: str, *values: object) -> list[Row]:
        """Run a query and return its rows."""

    def change(self, query: str, *values: object) -> int:
        """Run a change and return the number of rows that it changed."""

    def change_many(self, query: str, values: Sequence[Sequence[object]]) -> None:
        """Run a change several times."""


class Database(Protocol):
    """A database that this process alone has open. Its methods may be called in any thread.

    All of them raise a DatabaseError if the database fails; later calls work again once it does.

    Attributes:
        place: Its name, for messages.
        dialect: Words of the schema that differ, by their placeholders.
        share: Words behind a query which keep its rows from being changed until the end of the transaction.
    """

    place: str
    dialect: Mapping[str, str]
    share: str

    def transaction(self) -> AbstractContextManager[Transaction]:
        """Return a context that commits at its end, durably, or rolls back on an error."""

    def rows(self, query: str, *values: object) -> list[Row]:
        """Run a query outside any transaction."""

    def version(self) -> int:
        """Return the version of the schema; 0: there is none."""

    def change_schema(self, statements: Sequence[str], version: int) -> None:
        """Make or change tables, and note the version that they have then: all or nothing."""

    def close(self) -> None:
        """Close it."""


class SQLite:
    """SQLite in a file.

    A commit is on the disk when it returns, so that a killed process, or a machine that loses power, goes on
    from the last one.

    Args:
        folder: Folder of the file; it is created if missing.

    Raises:
        HeldError: Another process has it open.
        DatabaseError: The file can't be read, or isn't a database.
    """

    dialect: Mapping[str, str] = {
        "{number}": "INTEGER PRIMARY KEY AUTOINCREMENT",
        "{int}": "INTEGER",
        "{clustered}": "WITHOUT ROWID",
    }
    share = ""
    """A transaction that writes has the file to itself."""

    def __init__(self, folder: Path) -> None:
        # A new folder is closed to other users: batches have the prompts and answers of all tenants.
        folder.mkdir(0o700, parents=True, exist_ok=True)
        self._held = (folder / "lock").open("w")
        try:
            fcntl.flock(self._held, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._held.close()
            raise HeldError(f"{folder}: another process has these batches open; end it first") from None
        self.place = str(folder / "batches.db")
        self._lock, self._reading = threading.Lock(), threading.Lock()
        try:
            with self._translated():
                # One connection writes, another one reads: it needn't wait while a commit is synced.
                self._db, self._reader = (
                    sqlite3.connect(self.place, isolation_level=None, check_same_thread=False)
                    for _ in range(2)
                )
                self._db.row_factory = self._reader.row_factory = sqlite3.Row
                self._db.execute("PRAGMA journal_mode = WAL")
                # Each commit is synced; the default of WAL, NORMAL, may lose the last ones with the power.
                self._db.execute("PRAGMA synchronous = FULL")
        except BaseException:
            self._held.close()
            raise

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Return a context that commits at its end, or rolls back on an error."""
        with self._lock, self._translated():
            self._db.execute("BEGIN IMMEDIATE")
            try:
                yield _SQLiteTransaction(self._db)
                reach("store.commit")
                self._db.execute("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, such as a full disk.
                if self._db.in_transaction:
                    self._db.execute("ROLLBACK")
                raise
        reach("store.committed")

    def rows(self, query: str, *values: object) -> list[Row]:
        """Run a query outside any transaction."""
        with self._reading, self._translated():
            return [*map(dict, self._reader.execute(query, values).fetchall())]

    def version(self) -> int:
        """Return the version of the schema; 0: there is none."""
        return int(self.rows("PRAGMA user_version")[0]["user_version"])

    def change_schema(self, statements: Sequence[str], version: int) -> None:
        """Make or change tables, and note the version that they have then: all or nothing."""
        with self.transaction() as transaction:
            for statement in (*statements, f"PRAGMA user_version = {version}"):
                transaction.change(statement)

    def close(self) -> None:
        """Close it."""
        with self._lock, self._reading:
            self._reader.close()
            self._db.close()
            self._held.close()

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.Error as error:
            raise DatabaseError(f"{self.place}: {error}") from error


class _SQLiteTransaction:
    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def rows(self, query: str, *values: object) -> list[Row]:
        return [*map(dict, self._db.execute(query, values).fetchall())]

    def change(self, query: str, *values: object) -> int:
        return self._db.execute(query, values).rowcount

    def change_many(self, query: str, values: Sequence[Sequence[object]]) -> None:
        self._db.executemany(query, values)
