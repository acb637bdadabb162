"""Migrations of the tables of an earlier version: a function for each version."""

from collections.abc import Callable

import sqlalchemy as sa
from sqlalchemy import Connection
from sqlalchemy.schema import CreateIndex, CreateTable

from serve_app.jobs import db
from serve_app.jobs.errors import StoreError
from serve_app.jobs.failpoints import reach


def _columns(connection: Connection, names: dict[str, str]) -> None:
    """Add columns to the batches, with the types that these versions had."""
    for name, kind in names.items():
        connection.exec_driver_sql(f"ALTER TABLE batches ADD COLUMN {name} {kind}")


def to_2(connection: Connection) -> None:
    """Weights, and the tokens of answers."""
    tokens = ("input_tokens", "cached_tokens", "output_tokens", "reasoning_tokens")
    _columns(connection, {"weight": "DOUBLE PRECISION"} | dict.fromkeys(tokens, "BIGINT NOT NULL DEFAULT 0"))


def to_3(connection: Connection) -> None:
    """The API key of a batch."""
    _columns(connection, {"api_key": "TEXT NOT NULL DEFAULT ''"})


def to_4(connection: Connection) -> None:
    """Contents without a file."""
    (by_expiry,) = (index for index in db.BATCHES.indexes if index.name == "batches_by_expiry")
    connection.execute(CreateIndex(by_expiry))
    connection.execute(CreateTable(db.WITHOUT_FILE))


def to_5(connection: Connection) -> None:
    """The rights of a batch."""
    _columns(connection, {"rights": "TEXT NOT NULL DEFAULT '{}'"})


def to_6(connection: Connection) -> None:
    """Forecasts."""
    kinds = {"work": "DOUBLE PRECISION NOT NULL DEFAULT 0", "promised": "BOOLEAN NOT NULL DEFAULT FALSE"}
    _columns(connection, kinds)
    connection.execute(CreateTable(db.CAPACITY))


def to_7(connection: Connection) -> None:
    """The epoch of the owner."""
    connection.execute(CreateTable(db.OWNER))
    connection.execute(sa.insert(db.OWNER).values(epoch=0))


MIGRATIONS: dict[int, Callable[[Connection], None]] = {
    2: to_2,
    3: to_3,
    4: to_4,
    5: to_5,
    6: to_6,
    7: to_7,
}
"""The step to each version, from the version before."""

VERSION = max(MIGRATIONS)


def migrate(database: db.Database) -> None:
    """Create missing tables, or migrate the tables to this version. Each step is atomic.

    Raises:
        StoreError: The tables belong to an unknown version.
        DatabaseError: The database fails.
    """
    version = database.version()
    if version not in (0, 1, *MIGRATIONS):
        raise StoreError(f"{database.place}: written by another version ({version}, this one is {VERSION})")
    if not version:
        reach("store.create")
        with database.transaction() as connection:
            db.METADATA.create_all(connection, checkfirst=False)
            connection.execute(sa.insert(db.OWNER).values(epoch=0))
            database.keep_version(connection, VERSION)
        reach("store.created")
        return
    for step in range(version + 1, VERSION + 1):
        with database.transaction() as connection:
            MIGRATIONS[step](connection)
            database.keep_version(connection, step)
