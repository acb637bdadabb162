"""Tables of files and batches, and the databases that may hold them.

The columns of files and batches are exactly the fields of their dataclasses in `models`.
"""

import fcntl
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from urllib.parse import urlsplit

import sqlalchemy as sa
from pydantic_core import from_json, to_json
from sqlalchemy import Connection, RowMapping
from sqlalchemy.exc import DBAPIError, SQLAlchemyError

from serve_app.api.protocol import JSON
from serve_app.jobs.errors import DatabaseError, HeldError, StoreError
from serve_app.jobs.failpoints import reach
from serve_app.jobs.models import Batch, File, State
from serve_app.system.extras import extra

# Tables


class StoredText(sa.types.TypeDecorator[str]):
    """Text. PostgreSQL stores no NUL, which a client may send."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: sa.Dialect) -> str | None:
        """Return a value that can be stored."""
        if value is None or dialect.name != "postgresql":
            return value
        return value.replace("\0", "\ufffd")


class StoredJSON(sa.types.TypeDecorator[Any]):
    """A value as JSON text."""

    impl = sa.Text
    cache_ok = True

    def process_bind_param(self, value: Any, dialect: sa.Dialect) -> str:
        """Return the JSON text of a value."""
        return to_json(value).decode()

    def process_result_value(self, value: str | None, dialect: sa.Dialect) -> Any:
        """Return the value of a JSON text."""
        return None if value is None else from_json(value)


INTEGER = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

TYPES: dict[Any, sa.types.TypeEngine[Any]] = {
    str: StoredText(),
    State: StoredText(),
    int: INTEGER,
    float: sa.Double(),
    bool: sa.Boolean(),
    JSON: StoredJSON(),
    tuple[JSON, ...]: StoredJSON(),
}
"""Types of columns, by the types of fields."""

VERSION = 7
"""Version of the tables; a change of them counts it up."""

METADATA = sa.MetaData()


def _table(name: str, kind: type[Any], *indexes: sa.Index) -> sa.Table:
    """Return the table of a dataclass, whose rows have numbers in the order of their creation."""
    number = sa.Column("number", INTEGER, primary_key=True, autoincrement=True)
    columns = []
    for field in fields(kind):
        optional = type(None) in get_args(field.type)
        kept = get_args(field.type)[0] if optional else field.type
        column: sa.Column[Any] = sa.Column(
            field.name, TYPES[kept], nullable=optional, unique=field.name == "id"
        )
        columns.append(column)
    return sa.Table(name, METADATA, number, *columns, *indexes, sqlite_autoincrement=True)


FILES = _table(
    "files",
    File,
    sa.Index("files_of_tenant", "tenant", "number"),
    sa.Index("files_by_expiry", "expires_at"),
)

BATCHES = _table(
    "batches",
    Batch,
    sa.Index("batches_of_tenant", "tenant", "number"),
    sa.Index("batches_by_state", "state"),
    sa.Index("batches_by_input", "input_file"),
    sa.Index("batches_by_expiry", "expires_at"),
)

FINISHED = sa.Table(
    "finished",
    METADATA,
    sa.Column("batch", sa.Text(), primary_key=True),
    sa.Column("line", INTEGER, primary_key=True, autoincrement=False),
    sqlite_with_rowid=False,
)
"""Input lines of open batches whose results are in the output or the error file."""

WITHOUT_FILE = sa.Table("contents_without_file", METADATA, sa.Column("id", sa.Text(), primary_key=True))
"""Contents that may exist without a file: of uploads that are being added, and of files that were deleted."""

CAPACITY = sa.Table(
    "capacity",
    METADATA,
    sa.Column("model", sa.Text(), primary_key=True),
    sa.Column("hour", sa.Integer(), primary_key=True, autoincrement=False),
    *(sa.Column(name, sa.Double(), nullable=False) for name in ("work", "seconds", "at")),
    sa.Column("error", sa.Double()),
)
"""Capacity of the engines of each model, by hour of day."""

OWNER = sa.Table("owner", METADATA, sa.Column("epoch", sa.BigInteger(), nullable=False))
"""The epoch of the process that may write, see `Store`."""


# Databases


class Database:
    """A database that this process alone has open. Its methods may be called in any thread.

    All of them raise a DatabaseError if the database fails; later calls work again once the database does.
    One connection writes and another connection reads, so that reads needn't wait while a commit is synced.

    Attributes:
        place: Its name, for messages.
    """

    begin = "BEGIN"
    place: str

    def __init__(self, engine: sa.Engine) -> None:
        self._engine = engine
        self._writer: Connection | None = None
        self._reader: Connection | None = None
        self._writing, self._reading = threading.Lock(), threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Return a context that commits at its end, durably, or rolls back on an error."""
        with self._writing, self._translated():
            connection = self._writer = self._opened(self._writer, self._hold)
            connection.exec_driver_sql(self.begin)
            try:
                yield connection
                reach("store.commit")
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, such as a full disk.
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
                raise
        reach("store.committed")

    def rows(self, query: sa.Executable, values: dict[str, Any] | None = None) -> Sequence[RowMapping]:
        """Run a query outside any transaction."""
        with self._reading, self._translated():
            connection = self._reader = self._opened(self._reader, lambda connection: None)
            return connection.execute(query, values).mappings().all()

    def version(self) -> int:
        """Return the version of the schema; 0: no schema."""
        raise NotImplementedError

    def keep_version(self, connection: Connection, version: int) -> None:
        """Store the version that the schema has at the end of a transaction."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Create the tables in a new database.

        Raises:
            StoreError: The tables belong to another version.
            DatabaseError: The database fails.
        """
        version = self.version()
        if version == VERSION:
            return
        if version:
            raise StoreError(
                f"{self.place}: its tables have version {version}, and this release reads version {VERSION} "
                "alone; run the release that wrote it, or begin with a new batches.folder or batches.database"
            )
        reach("store.create")
        with self.transaction() as connection:
            METADATA.create_all(connection, checkfirst=False)
            connection.execute(sa.insert(OWNER).values(epoch=0))
            self.keep_version(connection, VERSION)
        reach("store.created")

    def close(self) -> None:
        """Close the database."""
        with self._writing, self._reading:
            for connection in (self._writer, self._reader):
                if connection is not None:
                    with suppress(SQLAlchemyError):
                        connection.close()
            self._engine.dispose()

    def _hold(self, connection: Connection) -> None:
        """Keep other processes out while the writing connection is open."""

    def _opened(self, connection: Connection | None, hold: Callable[[Connection], None]) -> Connection:
        """Return a working connection; a broken connection is opened again."""
        if connection is not None and not _is_broken(connection):
            return connection
        if connection is not None:
            with suppress(SQLAlchemyError):
                connection.invalidate()
                connection.close()
        connection = self._engine.connect()
        try:
            hold(connection)
        except BaseException:
            connection.invalidate()
            connection.close()
            raise
        return connection

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            # SQLAlchemy's own message has the statement and its values.
            message = str(error.orig).strip() or type(error.orig).__name__
            raise DatabaseError(f"{self.place}: {message}") from error.orig
        except SQLAlchemyError as error:
            raise DatabaseError(f"{self.place}: {error}") from error


def _is_broken(connection: Connection) -> bool:
    if connection.closed or connection.invalidated:
        return True
    dbapi: Any = connection.connection.dbapi_connection
    return bool(getattr(dbapi, "closed", False) or getattr(dbapi, "broken", False))


class SQLite(Database):
    """SQLite in a file.

    A commit is on the disk when it returns, so that a process that was killed, or a machine that lost power,
    continues from the last commit.

    Args:
        folder: Folder of the file; it is created if missing.

    Raises:
        HeldError: Another process has the folder open.
        DatabaseError: The file can't be read, or isn't a database.
    """

    begin = "BEGIN IMMEDIATE"

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
        url = sa.URL.create("sqlite", database=self.place)
        super().__init__(
            sa.create_engine(
                url, poolclass=sa.NullPool, connect_args={"isolation_level": None, "check_same_thread": False}
            )
        )
        try:
            with self._translated():
                self._writer = self._opened(None, self._hold)
        except BaseException:
            self._held.close()
            raise

    def version(self) -> int:
        """Return the version of the schema; 0: no schema."""
        return int(self.rows(sa.text("PRAGMA user_version"))[0]["user_version"])

    def keep_version(self, connection: Connection, version: int) -> None:
        """Store the version that the schema has at the end of a transaction."""
        connection.exec_driver_sql(f"PRAGMA user_version = {version}")

    def close(self) -> None:
        """Close the database."""
        super().close()
        self._held.close()

    def _hold(self, connection: Connection) -> None:
        connection.exec_driver_sql("PRAGMA journal_mode = WAL")
        # Each commit is synced; the default of WAL, NORMAL, may lose the last commits when the power fails.
        connection.exec_driver_sql("PRAGMA synchronous = FULL")


LOCK = 7_283_650_114
"""Number of the advisory lock of the process that has the batches open."""

CONNECT_S = 10

SILENCE_MS = 25_000
"""Milliseconds for which a machine may leave a query unacknowledged: as long as keep-alives take to find that
an idle connection is broken. Keep-alives aren't sent while a query is on its way; without this limit, it
could hang for 15 minutes."""

PG_OPTIONS = {
    # A server that hangs must not hold up this process for good.
    "options": "-c statement_timeout=30000 -c idle_in_transaction_session_timeout=60000",
    "connect_timeout": CONNECT_S,
    "application_name": "saturate",
    # A machine that has lost its power closes no connection.
    "keepalives_idle": 10,
    "keepalives_interval": 5,
    "keepalives_count": 3,
    "tcp_user_timeout": SILENCE_MS,
}


class Postgres(Database):
    """PostgreSQL. A commit is on the server's disk when it returns, unless `synchronous_commit` is off there.

    The lock that keeps out other processes belongs to the writing connection, and is taken again with a new
    connection.

    Args:
        url: URL of the database.

    Raises:
        StoreError: The package psycopg is missing.
        HeldError: Another process has the batches open.
        DatabaseError: The server can't be reached.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise StoreError(f"batches.database needs {extra('postgres')}") from None
        parts = urlsplit(url)
        # Without the password.
        self.place = f"postgresql://{parts.hostname or ''}{parts.path}"
        self._url = url
        # libpq reads the URL: it supports parameters that SQLAlchemy doesn't.
        engine = sa.create_engine(
            "postgresql+psycopg://",
            creator=lambda: psycopg.connect(url, autocommit=True, **PG_OPTIONS),
            poolclass=sa.NullPool,
            isolation_level="AUTOCOMMIT",
        )
        super().__init__(engine)
        with self._writing, self._translated():
            self._writer = self._opened(None, self._hold)

    def version(self) -> int:
        """Return the version of the schema; 0: no schema."""
        found = self.rows(sa.text("SELECT to_regclass('saturate_version') IS NOT NULL AS there"))
        if not found[0]["there"]:
            return 0
        return int(self.rows(sa.text("SELECT version FROM saturate_version"))[0]["version"])

    def keep_version(self, connection: Connection, version: int) -> None:
        """Store the version that the schema has at the end of a transaction."""
        for statement in (
            "CREATE TABLE IF NOT EXISTS saturate_version (version BIGINT NOT NULL)",
            "DELETE FROM saturate_version",
            f"INSERT INTO saturate_version VALUES ({version})",
        ):
            connection.exec_driver_sql(statement)

    def close(self) -> None:
        """Close the database."""
        with self._writing:
            if self._writer is not None:
                # The server notices the end of a connection a moment later.
                with suppress(SQLAlchemyError):
                    self._writer.execute(sa.select(sa.func.pg_advisory_unlock(LOCK)))
        super().close()

    def _hold(self, connection: Connection) -> None:
        if connection.execute(sa.select(sa.func.pg_try_advisory_lock(LOCK))).scalar_one():
            return
        message = f"{self.place}: another process has these batches open; end it first"
        # The lock may still belong to a broken connection of this process, which the server hasn't noticed
        # yet.
        raise HeldError(message) if self._writer is None else DatabaseError(message)
