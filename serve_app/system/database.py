"""Databases in SQLite or PostgreSQL: durable transactions, one owner at a time, one version of the tables.

A process that opens a database becomes its owner at once, and takes an *epoch* that is higher than all epochs
before. Each transaction checks the epoch: the commits of an earlier owner fail from then on, wherever that
process runs. No lock has to be waited for, and no lost lock does harm.
"""

import re
import sqlite3
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import sqlalchemy as sa
from sqlalchemy import Connection, RowMapping
from sqlalchemy.exc import (
    DataError,
    DBAPIError,
    IntegrityError,
    NotSupportedError,
    ProgrammingError,
    SQLAlchemyError,
    TimeoutError,
)

from serve_app.system.distribution import extra
from serve_app.system.private_files import make_folders

OWNERS = sa.Table(
    "saturate_owners",
    sa.MetaData(),
    sa.Column("name", sa.Text(), primary_key=True),
    sa.Column("version", sa.BigInteger(), nullable=False),
    sa.Column("epoch", sa.BigInteger(), nullable=False),
)
"""Version and owner of each group of tables: PostgreSQL may have the tables of batches and of quotas."""

CONNECTIONS = 4
"""Maximum connections of a process to one database."""

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

NETWORK = re.compile(
    r"nfs4?|cifs|smb3|ceph|lustre|gpfs|gfs2|ocfs2|9p|virtiofs|fuse\.(glusterfs|ceph-fuse|juicefs)"
)
"""Network file systems whose locks hold between machines, by the names that the kernel has for them."""

WITHOUT_LOCKS = re.compile(
    r"afs|beegfs\w*|fuse\.(sshfs|s3fs|rclone|gcsfuse|goofys|geesefs|mountpoint-s3|mount-s3|blobfuse2?)"
)
"""File systems whose locks hold on one machine only, or that can't replace a part of a file."""

LOCAL_LOCKS = {"nolock", "nobrl", "local_lock=all", "local_lock=posix", "noflock", "localflock"}
"""Options of a mount with which the locks of a network file system hold on one machine only."""


class DatabaseError(OSError):
    """The database fails or can't be reached; a commit in progress may or may not have taken place."""


class FencedError(Exception):
    """Another process has taken over: nothing was written, and this process must stop writing."""


class UnusableError(Exception):
    """The database can't be used as it is; the message says what to change."""


class Database:
    """A database that this process owns until another process opens it.

    Its methods may be called in any thread. All of them raise a DatabaseError if the database fails; later
    calls work again once the database does. A wrong statement raises the driver's own error.

    Args:
        engine: The connections, without transactions of their own.
        place: Its name, for messages.
        name: Name of the group of tables.
        reach: Called with the name of each point around a commit; a test ends the process there.

    Attributes:
        epoch: The number of this ownership.
    """

    def __init__(self, engine: sa.Engine, place: str, name: str, reach: Callable[[str], None]) -> None:
        self.place = place
        self.epoch = 0
        self._engine = engine
        self._name = name
        self._reach = reach
        self._owner = sa.select(OWNERS.c.epoch).where(OWNERS.c.name == name)
        # SQLite has one writer; its own waiting isn't fair.
        self._writing = threading.Lock()

    @contextmanager
    def transaction(self) -> Iterator[Connection]:
        """Return a context that commits at its end, durably, or rolls back on an error.

        No other process becomes the owner before its end.

        Raises:
            FencedError: Another process has taken over.
        """
        with self._begun() as connection:
            # With a lock of the row in PostgreSQL; SQLite has one transaction at a time.
            self._check(connection.execute(self._owner.with_for_update(read=True)).scalar())
            yield connection

    def rows(self, query: sa.Executable, values: dict[str, Any] | None = None) -> Sequence[RowMapping]:
        """Run a query outside any transaction."""
        with self._translated(), self._engine.connect() as connection:
            return connection.execute(query, values).mappings().all()

    def check_owner(self) -> None:
        """Raise a FencedError if another process has taken over."""
        rows = self.rows(self._owner)
        self._check(rows[0]["epoch"] if rows else None)

    def close(self) -> None:
        """Close the connections."""
        with self._writing:
            self._engine.dispose()

    def take_over(self, tables: sa.MetaData, version: int, now: int) -> None:
        """Become the owner; a new database gets its tables.

        Epochs start from the current time: a database that was restored from a backup doesn't repeat the
        epochs that it has forgotten.

        Args:
            tables: The tables.
            version: Their version.
            now: Seconds since the Unix epoch.

        Raises:
            UnusableError: The tables belong to another version.
        """
        mine = OWNERS.c.name == self._name
        # Another process may make the same tables at the same time.
        with self._begun(making=True) as connection:
            OWNERS.create(connection, checkfirst=True)
            found = connection.execute(sa.select(OWNERS.c.version).where(mine)).scalar()
            if found is None and any(map(sa.inspect(connection).has_table, tables.tables)):
                found = "0"
            if found is None:
                tables.create_all(connection, checkfirst=False)
                connection.execute(sa.insert(OWNERS).values(name=self._name, version=version, epoch=0))
            elif found != version:
                raise UnusableError(
                    f"{self.place}: its tables have version {found}, and this release reads version "
                    f"{version} alone; run the release that wrote it, or begin with a new folder or database"
                )
            epoch = sa.case((OWNERS.c.epoch < now, now), else_=OWNERS.c.epoch + 1)
            taken = sa.update(OWNERS).where(mine).values(epoch=epoch).returning(OWNERS.c.epoch)
            self.epoch = connection.execute(taken).scalar_one()

    def _check(self, epoch: int | None) -> None:
        if epoch != self.epoch:
            raise FencedError(
                f"{self.place}: another process has taken over these {self._name} (its epoch is {epoch}, the "
                f"epoch of this process {self.epoch}); this process writes nothing more"
            )

    @contextmanager
    def _begun(self, making: bool = False) -> Iterator[Connection]:
        with self._writing, self._translated(making), self._engine.connect() as connection:
            sqlite = connection.dialect.name == "sqlite"
            connection.exec_driver_sql("BEGIN IMMEDIATE" if sqlite else "BEGIN")
            try:
                yield connection
                self._reach("store.commit")
                connection.exec_driver_sql("COMMIT")
            except BaseException:
                # SQLite has rolled back by itself after some errors, such as a full disk.
                with suppress(SQLAlchemyError):
                    connection.exec_driver_sql("ROLLBACK")
                raise
        self._reach("store.committed")

    @contextmanager
    def _translated(self, making: bool = False) -> Iterator[None]:
        try:
            yield
        except DBAPIError as error:
            # SQLAlchemy's own message has the statement and its values.
            if not making and _is_wrong(error) and error.orig is not None:
                raise error.orig from None
            message = str(error.orig).strip() or type(error.orig).__name__
            raise DatabaseError(f"{self.place}: {message}") from error.orig
        except TimeoutError as error:
            raise DatabaseError(f"{self.place}: {error}") from error


def _is_wrong(error: DBAPIError) -> bool:
    """Return whether a statement is wrong, or the tables are: it fails again, however often it is tried."""
    if getattr(error.orig, "sqlite_errorcode", None) == sqlite3.SQLITE_ERROR:
        # Python has one class for these errors and the errors of the disk.
        return True
    return isinstance(error, ProgrammingError | IntegrityError | DataError | NotSupportedError)


def open_database(
    where: Path | str,
    name: str,
    tables: sa.MetaData,
    version: int,
    *,
    alone: bool = False,
    clock: Callable[[], float] = time.time,
    reach: Callable[[str], None] = lambda point: None,
) -> Database:
    """Open a database and become its owner; a new one gets its tables.

    Args:
        where: The file of SQLite, whose folder is created if missing; or the URL of PostgreSQL.
        name: Name of the tables' content, such as `batches`: PostgreSQL may hold several groups of tables.
        tables: The tables.
        version: Their version; a change of the tables counts it up.
        alone: Whether no other process may open a database in SQLite before this process closes it or ends;
            its error has SQLite's code SQLITE_BUSY.
        clock: Seconds since the Unix epoch.
        reach: Called with the name of each point around a commit; a test ends the process there.

    Raises:
        UnusableError: A package is missing, the tables belong to another version, or the file is on a file
            system without locks.
        OSError: The folder or the file can't be made.
        DatabaseError: The database fails, or the file isn't a database.
    """
    engine, place = _sqlite(where, alone) if isinstance(where, Path) else _postgres(where)
    database = Database(engine, place, name, reach)
    try:
        database.take_over(tables, version, int(clock()))
    except BaseException:
        database.close()
        raise
    return database


def _sqlite(path: Path, alone: bool) -> tuple[sa.Engine, str]:
    mode = journal_mode(path, Path("/proc/self/mounts").read_text())
    # A new folder and a new file are closed to other users, and so are SQLite's files beside it.
    make_folders(path.parent)
    path.touch(0o600)
    url = sa.URL.create("sqlite", database=str(path))
    options = {"isolation_level": None, "check_same_thread": False} | ({"timeout": 0} if alone else {})
    connections = 1 if alone else CONNECTIONS
    engine = sa.create_engine(url, pool_size=connections, max_overflow=0, connect_args=options)

    @sa.event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        if alone:
            connection.execute("PRAGMA locking_mode = EXCLUSIVE")
        connection.execute(f"PRAGMA journal_mode = {mode}")
        # Each commit is synced; by default, WAL may lose the last commits when the power fails.
        connection.execute("PRAGMA synchronous = EXTRA")

    return engine, str(path)


def journal_mode(path: Path, mounts: str) -> str:
    """Return SQLite's `journal_mode` for a file.

    WAL needs memory that all processes share, so machines that share a file need the older journal, whose
    locks the file system carries between them.

    Args:
        path: The file, which may be missing.
        mounts: The mounted file systems, as in `/proc/mounts`.

    Raises:
        UnusableError: The locks of the file system hold on one machine only.
    """
    folders = {path.resolve(), *path.resolve().parents}
    kind = device = ""
    options: set[str] = set()
    deepest = -1
    for mount in mounts.splitlines():
        found, point, type, flags, *_ = mount.split()
        point = re.sub(r"\\(\d{3})", lambda code: chr(int(code[1], 8)), point)
        # A later mount covers an earlier one.
        if Path(point) in folders and len(Path(point).parts) >= deepest:
            deepest, kind, device, options = len(Path(point).parts), type, found, set(flags.split(","))
    if kind == "fuse":
        kind = f"fuse.{device}"
    if WITHOUT_LOCKS.fullmatch(kind) or (NETWORK.fullmatch(kind) and options & LOCAL_LOCKS):
        raise UnusableError(
            f"{path}: it is on {kind}, whose locks hold on one machine only, so a database there can be "
            "damaged; choose a folder on a disk, on NFS with locks, or PostgreSQL"
        )
    return "DELETE" if NETWORK.fullmatch(kind) else "WAL"


def _postgres(url: str) -> tuple[sa.Engine, str]:
    try:
        import psycopg
    except ImportError:
        raise UnusableError(f"a database in PostgreSQL needs {extra('postgres')}") from None
    parts = urlsplit(url)
    engine = sa.create_engine(
        "postgresql+psycopg://",
        # libpq reads the URL: it supports parameters that SQLAlchemy doesn't.
        creator=lambda: psycopg.connect(url, autocommit=True, **PG_OPTIONS),
        isolation_level="AUTOCOMMIT",
        pool_size=CONNECTIONS,
        max_overflow=0,
        # A broken connection is opened again.
        pool_pre_ping=True,
    )
    # The name leaves out the password.
    return engine, f"postgresql://{parts.hostname or ''}{parts.path}"
