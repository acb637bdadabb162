"""Databases that keep the state of the quotas: texts by key, in SQLite or PostgreSQL.

One process at a time owns the state. A process that loads the state takes it over, and the earlier process
can no longer save: after a lost connection to a node, two processes may run for a while.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

from sqlalchemy import (
    Column,
    Connection,
    Engine,
    MetaData,
    Table,
    Text,
    bindparam,
    create_engine,
    event,
    select,
)
from sqlalchemy.engine import make_url
from sqlalchemy.exc import NoSuchModuleError, SQLAlchemyError
from sqlalchemy.pool import StaticPool

from serve_app.system.extras import extra
from serve_app.system.private_files import close_to_others, make_folders

EPOCH = "epoch"
"""The key whose number grows with each process that has loaded the state."""

CONNECT_S = 10


class QuotaStateError(Exception):
    """The database fails, or can't be reached. A save in progress may have succeeded or failed."""


class TakenOverError(QuotaStateError):
    """Another process has loaded the state since."""


class State(Protocol):
    """Texts by key. The methods may be called in any thread, one at a time; all raise a QuotaStateError."""

    place: str

    def load(self) -> dict[str, str]:
        """Return all texts, and take over from the process that loaded them before."""

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete (None) texts, atomically and durably.

        Raises:
            TakenOverError: Another process has loaded the state since.
        """

    def close(self) -> None:
        """Close the database."""


_METADATA = MetaData()

_STATES = {
    name: Table(name, _METADATA, Column("key", Text, primary_key=True), Column("value", Text, nullable=False))
    for name in ("quotas", "saturate_quotas")
}
"""The table in SQLite, and in PostgreSQL, where other programs may share the database."""


class SQLState:
    """A table in SQLite or PostgreSQL. A save is on the disk when it returns.

    Args:
        engine: The database.
        place: Its name in messages.
    """

    def __init__(self, engine: Engine, place: str) -> None:
        self.place = place
        self._engine = engine
        self._table = _STATES["quotas" if engine.dialect.name == "sqlite" else "saturate_quotas"]
        self._epoch = 0

    def load(self) -> dict[str, str]:
        """Return all texts, and take over."""
        try:
            with self._engine.begin() as db:
                self._table.create(db, checkfirst=True)
                if self._engine.dialect.name == "postgresql":
                    # Processes load one after the other, from the first process on.
                    db.exec_driver_sql(f"LOCK TABLE {self._table.name} IN EXCLUSIVE MODE")
                state: dict[str, str] = dict(tuple(row) for row in db.execute(select(self._table)))
                self._epoch = _epoch(self.place, state.pop(EPOCH, 0)) + 1
                self._set(db, {EPOCH: str(self._epoch)})
        except SQLAlchemyError as error:
            raise self._error(error) from error
        return state

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete texts."""
        table = self._table
        try:
            with self._engine.begin() as db:
                query = select(table.c.value).where(table.c.key == EPOCH).with_for_update(read=True)
                found = db.execute(query).scalar()
                # Without an epoch, the table was emptied.
                if found is None or int(found) != self._epoch:
                    raise TakenOverError(f"{self.place}: another process keeps these quotas now")
                self._set(db, changes)
        except SQLAlchemyError as error:
            raise self._error(error) from error

    def close(self) -> None:
        """Close the database."""
        self._engine.dispose()

    def _set(self, db: Connection, changes: Mapping[str, str | None]) -> None:
        table = self._table
        keys = [{"name": key} for key in changes]
        rows = [{"key": key, "value": value} for key, value in changes.items() if value is not None]
        if keys:
            # The upsert syntax differs between both dialects.
            db.execute(table.delete().where(table.c.key == bindparam("name")), keys)
        if rows:
            db.execute(table.insert(), rows)

    def _error(self, error: SQLAlchemyError) -> QuotaStateError:
        return QuotaStateError(f"{self.place}: {getattr(error, 'orig', None) or error}")


def _epoch(place: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise QuotaStateError(f"{place}: this is not the state of quotas: its {EPOCH} is {text!r}") from None


def open_state(folder: Path | None, url: str | None) -> State:
    """Return the database of a URL; without one, SQLite in the folder.

    Raises:
        QuotaStateError: It can't be used, or its package is missing.
    """
    if url is None:
        assert folder is not None
        return _sqlite(folder)
    return _postgres(url)


def _sqlite(folder: Path) -> SQLState:
    path = folder / "quotas.db"
    try:
        make_folders(folder)
        # SQLite's other files have the permissions of this one.
        path.touch(0o600)
        close_to_others(path)
    except OSError as error:
        raise QuotaStateError(f"{path}: {error}") from error
    engine = create_engine(
        f"sqlite:///{path}", poolclass=StaticPool, connect_args={"check_same_thread": False}
    )

    @event.listens_for(engine, "connect")
    def settings(connection: Any, _: object) -> None:
        # SQLAlchemy begins the transactions itself, below.
        connection.isolation_level = None
        connection.execute("PRAGMA journal_mode = WAL")
        # The default of WAL, NORMAL, may lose the last saves with the power.
        connection.execute("PRAGMA synchronous = FULL")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    return SQLState(engine, str(path))


def _postgres(url: str) -> SQLState:
    parts = urlsplit(url)
    try:
        engine = create_engine(
            make_url(url).set(drivername="postgresql+psycopg"),
            pool_size=1,
            max_overflow=0,
            # A broken connection is opened again.
            pool_pre_ping=True,
            connect_args={
                "connect_timeout": CONNECT_S,
                # A server that hangs must not block this process forever.
                "options": "-c statement_timeout=30000 -c idle_in_transaction_session_timeout=60000",
                "application_name": "saturate-quotas",
                "keepalives_idle": 10,
                "keepalives_interval": 5,
                "keepalives_count": 3,
            },
        )
    except (ImportError, NoSuchModuleError):
        raise QuotaStateError(f"usage.quotas.database needs {extra('postgres')}") from None
    # The name leaves out the password.
    return SQLState(engine, f"postgresql://{parts.hostname or ''}{parts.path}")
