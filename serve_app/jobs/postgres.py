"""PostgreSQL as the database of the state."""

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any
from urllib.parse import urlsplit

from serve_app.jobs.database import Row, Transaction
from serve_app.jobs.errors import DatabaseError, HeldError, StoreError
from serve_app.jobs.failpoints import reach

try:
    import psycopg
    from psycopg.rows import dict_row
except ImportError:
    raise StoreError(
        "batches.database needs psycopg: pip install 'saturate[postgres]'; in a checkout: "
        "pip install -e '.[postgres]'"
    ) from None

LOCK = 7_283_650_114
"""Number of the advisory lock that the process holds which has the batches open."""

CONNECT_S = 10

SILENCE_MS = 25_000
"""Milliseconds for which a machine may leave a query unacknowledged: as long as keep-alives take to find that
an idle connection is broken. They aren't sent while a query is on its way, which could take 15 minutes."""

OPTIONS = "-c statement_timeout=30000 -c idle_in_transaction_session_timeout=60000"
"""A server that hangs must not hold up this process for good."""


class Postgres:
    """PostgreSQL. A commit is on the server's disk when it returns, unless `synchronous_commit` is off there.

    A connection that breaks is opened again by the next call. The lock that keeps out other processes belongs
    to the connection that writes, and is taken again with it.

    Args:
        url: URL of the database.

    Raises:
        HeldError: Another process has the batches open.
        DatabaseError: The server can't be reached.
    """

    dialect: Mapping[str, str] = {
        "{number}": "BIGSERIAL PRIMARY KEY",
        "{int}": "BIGINT",
        "{clustered}": "",
    }
    share = " FOR SHARE"

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        # Without the password.
        self.place = f"postgresql://{parts.hostname or ''}{parts.path}"
        self._url = url
        self._lock, self._reading = threading.Lock(), threading.Lock()
        self._db: psycopg.Connection[Any] | None = None
        self._reader: psycopg.Connection[Any] | None = None
        with self._lock, self._translated():
            self._writing()

    @contextmanager
    def transaction(self) -> Iterator[Transaction]:
        """Return a context that commits at its end, or rolls back on an error."""
        with self._lock, self._translated():
            db = self._writing()
            with db.transaction():
                yield _PostgresTransaction(db)
                reach("store.commit")
        reach("store.committed")

    def rows(self, query: str, *values: object) -> list[Row]:
        """Run a query outside any transaction."""
        with self._reading, self._translated():
            if self._reader is None or self._reader.closed or self._reader.broken:
                self._reader = self._connect()
            return _rows(self._reader, query, values)

    def version(self) -> int:
        """Return the version of the schema; 0: there is none."""
        found = self.rows("SELECT to_regclass('saturate_version') IS NOT NULL AS there")
        if not found[0]["there"]:
            return 0
        return int(self.rows("SELECT version FROM saturate_version")[0]["version"])

    def change_schema(self, statements: Sequence[str], version: int) -> None:
        """Make or change tables, and note the version that they have then: all or nothing."""
        with self.transaction() as transaction:
            for statement in statements:
                transaction.change(statement)
            transaction.change("CREATE TABLE IF NOT EXISTS saturate_version (version BIGINT NOT NULL)")
            transaction.change("DELETE FROM saturate_version")
            transaction.change("INSERT INTO saturate_version VALUES (?)", version)

    def close(self) -> None:
        """Close it."""
        with self._lock, self._reading:
            if self._db is not None:
                # The server notices the end of a connection a moment later.
                with suppress(psycopg.Error):
                    self._db.execute("SELECT pg_advisory_unlock(%s)", (LOCK,))
            for connection in (self._db, self._reader):
                if connection is not None:
                    connection.close()

    def _writing(self) -> "psycopg.Connection[Any]":
        """Return the connection that writes, which has the lock."""
        if self._db is None or self._db.closed or self._db.broken:
            db = self._connect()
            try:
                (row,) = _rows(db, "SELECT pg_try_advisory_lock(?) AS held", (LOCK,))
            except BaseException:
                db.close()
                raise
            if not row["held"]:
                db.close()
                message = f"{self.place}: another process has these batches open; end it first"
                # After a break, the server may not have noticed yet that the other one was this process.
                raise HeldError(message) if self._db is None else DatabaseError(message)
            self._db = db
        return self._db

    def _connect(self) -> "psycopg.Connection[Any]":
        return psycopg.connect(
            self._url,
            autocommit=True,
            row_factory=dict_row,
            connect_timeout=CONNECT_S,
            options=OPTIONS,
            application_name="saturate",
            # A machine that has lost its power closes no connection.
            keepalives_idle=10,
            keepalives_interval=5,
            keepalives_count=3,
            tcp_user_timeout=SILENCE_MS,
        )

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except psycopg.Error as error:
            message = str(error).strip() or type(error).__name__
            raise DatabaseError(f"{self.place}: {message}") from error


class _PostgresTransaction:
    def __init__(self, db: "psycopg.Connection[Any]") -> None:
        self._db = db

    def rows(self, query: str, *values: object) -> list[Row]:
        return _rows(self._db, query, values)

    def change(self, query: str, *values: object) -> int:
        changed: int = self._db.execute(_marked(query), _storable(values)).rowcount
        return changed

    def change_many(self, query: str, values: Sequence[Sequence[object]]) -> None:
        with self._db.cursor() as cursor:
            cursor.executemany(_marked(query), values)


def _rows(db: "psycopg.Connection[Any]", query: str, values: Sequence[object]) -> list[Row]:
    found: list[Row] = db.execute(_marked(query), _storable(values)).fetchall()
    return found


def _storable(values: Sequence[object]) -> list[object]:
    """Return values of which none has a NUL, which PostgreSQL's text can't hold and a client may send."""
    return [value.replace("\0", "\ufffd") if isinstance(value, str) else value for value in values]


def _marked(query: str) -> bytes:
    """Return a query with psycopg's placeholders. None of ours has a `?` or a `%` of its own."""
    return query.replace("?", "%s").encode()
