"""Databases that keep the state of the quotas: texts by key, in SQLite, PostgreSQL or Redis.

One process at a time has the state. The next one that loads it takes it over, and the earlier one can't save
any more: after a lost connection to a node, two may run for a while.
"""

import sqlite3
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol
from urllib.parse import urlsplit

EPOCH = "epoch"
"""The key whose number grows with each process that has loaded the state."""

CONNECT_S = 10


class StateError(Exception):
    """The database fails, or can't be reached. Nothing is known of a save that was under way."""


class TakenOverError(StateError):
    """Another process has loaded the state since."""


class State(Protocol):
    """Texts by key. The methods may be called in any thread, one at a time; all raise a StateError."""

    place: str

    def load(self) -> dict[str, str]:
        """Return all texts, and take over from the process that has loaded them before."""

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete (None) texts: all or none of them, durably.

        Raises:
            TakenOverError: Another process has loaded the state since.
        """

    def close(self) -> None:
        """Close the database."""


class SQLiteState:
    """SQLite in a file. A save is on the disk when it returns.

    Args:
        folder: Folder of the file; it is created if missing.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder / "quotas.db")
        self._epoch = 0
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._db = sqlite3.connect(self.place, isolation_level=None, check_same_thread=False)
            self._db.execute("PRAGMA journal_mode = WAL")
            # The default of WAL, NORMAL, may lose the last saves with the power.
            self._db.execute("PRAGMA synchronous = FULL")
            self._db.execute("CREATE TABLE IF NOT EXISTS quotas (key TEXT PRIMARY KEY, value TEXT NOT NULL)")
        except (OSError, sqlite3.Error) as error:
            raise StateError(f"{self.place}: {error}") from error

    def load(self) -> dict[str, str]:
        """Return all texts, and take over."""
        try:
            with _transaction(self._db):
                state = dict(self._db.execute("SELECT key, value FROM quotas").fetchall())
                self._epoch = _epoch(self.place, state.pop(EPOCH, 0)) + 1
                self._db.execute("INSERT OR REPLACE INTO quotas VALUES (?, ?)", (EPOCH, str(self._epoch)))
        except sqlite3.Error as error:
            raise StateError(f"{self.place}: {error}") from error
        return state

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete texts."""
        kept = [(key, value) for key, value in changes.items() if value is not None]
        dropped = [(key,) for key, value in changes.items() if value is None]
        try:
            with _transaction(self._db):
                found = self._db.execute("SELECT value FROM quotas WHERE key = ?", (EPOCH,)).fetchone()
                # Without it somebody has emptied the table.
                if found is None or int(found[0]) != self._epoch:
                    raise TakenOverError(f"{self.place}: another process keeps these quotas now")
                self._db.executemany("INSERT OR REPLACE INTO quotas VALUES (?, ?)", kept)
                self._db.executemany("DELETE FROM quotas WHERE key = ?", dropped)
        except sqlite3.Error as error:
            raise StateError(f"{self.place}: {error}") from error

    def close(self) -> None:
        """Close the database."""
        self._db.close()


class _transaction:  # noqa: N801
    """Commits at the end, or rolls back on an error."""

    def __init__(self, db: sqlite3.Connection) -> None:
        self._db = db

    def __enter__(self) -> None:
        self._db.execute("BEGIN IMMEDIATE")

    def __exit__(self, kind: object, error: object, trace: object) -> None:
        if self._db.in_transaction:
            self._db.execute("COMMIT" if error is None else "ROLLBACK")


class PostgresState:
    """A table of PostgreSQL. A connection that breaks is opened again by the next call.

    Args:
        url: URL of the database.
    """

    def __init__(self, url: str) -> None:
        try:
            import psycopg
        except ImportError:
            raise StateError(
                "usage.quotas.database needs psycopg: pip install 'saturate[postgres]'"
            ) from None
        parts = urlsplit(url)
        # Without the password.
        self.place = f"postgresql://{parts.hostname or ''}{parts.path}"
        self._psycopg: Any = psycopg
        self._url = url
        self._epoch = 0
        self._connection: Any = None

    def load(self) -> dict[str, str]:
        """Return all texts, and take over."""
        try:
            db = self._connect()
            with db.transaction():
                db.execute(
                    "CREATE TABLE IF NOT EXISTS saturate_quotas (key TEXT PRIMARY KEY, value TEXT NOT NULL)"
                )
                # One after the other, from the first process on.
                db.execute("LOCK TABLE saturate_quotas IN EXCLUSIVE MODE")
                state = dict(db.execute("SELECT key, value FROM saturate_quotas").fetchall())
                self._epoch = _epoch(self.place, state.pop(EPOCH, 0)) + 1
                self._put(db, [(EPOCH, str(self._epoch))])
        except self._psycopg.Error as error:
            raise StateError(f"{self.place}: {error}") from error
        return state

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete texts."""
        try:
            db = self._connect()
            with db.transaction(), db.cursor() as cursor:
                query = "SELECT value FROM saturate_quotas WHERE key = %s FOR SHARE"
                found = db.execute(query, (EPOCH,)).fetchone()
                if found is None or int(found[0]) != self._epoch:
                    raise TakenOverError(f"{self.place}: another process keeps these quotas now")
                self._put(db, [(key, value) for key, value in changes.items() if value is not None])
                dropped = [(key,) for key, value in changes.items() if value is None]
                if dropped:
                    cursor.executemany("DELETE FROM saturate_quotas WHERE key = %s", dropped)
        except self._psycopg.Error as error:
            raise StateError(f"{self.place}: {error}") from error

    def close(self) -> None:
        """Close the database."""
        if self._connection is not None:
            self._connection.close()

    @staticmethod
    def _put(db: Any, rows: list[tuple[str, str]]) -> None:
        if rows:
            with db.cursor() as cursor:
                cursor.executemany(
                    "INSERT INTO saturate_quotas VALUES (%s, %s) "
                    "ON CONFLICT (key) DO UPDATE SET value = EXCLUDED.value",
                    rows,
                )

    def _connect(self) -> Any:
        if self._connection is None or self._connection.closed or self._connection.broken:
            self._connection = self._psycopg.connect(
                self._url,
                autocommit=True,
                connect_timeout=CONNECT_S,
                # A server that hangs must not hold up this process for good.
                options="-c statement_timeout=30000 -c idle_in_transaction_session_timeout=60000",
                application_name="saturate-quotas",
                keepalives_idle=10,
                keepalives_interval=5,
                keepalives_count=3,
            )
        return self._connection


class RedisState:
    """A hash of Redis. A save is as durable as the server's settings make it (`appendfsync`).

    Args:
        url: URL of the server.
    """

    HASH = "saturate:quotas"

    SAVE = """
        if redis.call('HGET', KEYS[1], 'epoch') ~= ARGV[1] then return 0 end
        local kept = tonumber(ARGV[2])
        for i = 3, 2 + 2 * kept, 2 do redis.call('HSET', KEYS[1], ARGV[i], ARGV[i + 1]) end
        for i = 3 + 2 * kept, #ARGV do redis.call('HDEL', KEYS[1], ARGV[i]) end
        return 1
    """
    """Changes all or nothing, unless another process has taken over. Redis runs a script in one piece."""

    def __init__(self, url: str) -> None:
        try:
            import redis
        except ImportError:
            raise StateError("usage.quotas.database needs redis: pip install 'saturate[redis]'") from None
        parts = urlsplit(url)
        self.place = f"redis://{parts.hostname or ''}:{parts.port or 6379}{parts.path}"
        self._error: type[Exception] = redis.RedisError
        self._redis: Any = redis.Redis.from_url(
            url, decode_responses=True, socket_timeout=CONNECT_S, socket_connect_timeout=CONNECT_S
        )
        self._epoch = ""

    def load(self) -> dict[str, str]:
        """Return all texts, and take over."""
        try:
            # First the number: then nothing that is read here can change behind it.
            self._epoch = str(self._redis.hincrby(self.HASH, EPOCH, 1))
            state: dict[str, str] = dict(self._redis.hgetall(self.HASH))
        except self._error as error:
            raise StateError(f"{self.place}: {error}") from error
        state.pop(EPOCH, None)
        return state

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete texts."""
        kept = [part for key, value in changes.items() if value is not None for part in (key, value)]
        dropped = [key for key, value in changes.items() if value is None]
        try:
            done = self._redis.eval(self.SAVE, 1, self.HASH, self._epoch, len(kept) // 2, *kept, *dropped)
        except self._error as error:
            raise StateError(f"{self.place}: {error}") from error
        if not done:
            raise TakenOverError(f"{self.place}: another process keeps these quotas now")

    def close(self) -> None:
        """Close the connections."""
        self._redis.close()


def _epoch(place: str, text: str | int) -> int:
    try:
        return int(text)
    except ValueError:
        raise StateError(f"{place}: this is not the state of quotas: its {EPOCH} is {text!r}") from None


def open_state(folder: Path | None, url: str | None) -> State:
    """Return the database of a URL; without one, SQLite in the folder.

    Raises:
        StateError: It can't be used, or its package is missing.
    """
    if url is None:
        assert folder is not None
        return SQLiteState(folder)
    return RedisState(url) if url.startswith("redis") else PostgresState(url)
