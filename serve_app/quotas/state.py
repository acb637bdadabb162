"""The database of the quotas: texts by key, in SQLite or PostgreSQL.

The process that opens the database last owns it; earlier processes can no longer save. After a lost
connection to a node, two processes may run for a while.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import sqlalchemy as sa

from serve_app.system.database import open_database

TABLES = sa.MetaData()

TEXTS = sa.Table(
    "saturate_quotas",
    TABLES,
    sa.Column("key", sa.Text(), primary_key=True),
    sa.Column("value", sa.Text(), nullable=False),
)

VERSION = 1
"""Version of the table and of its texts."""


class State(Protocol):
    """Texts by key. The methods run in any thread, one at a time; each may raise a DatabaseError."""

    @property
    def place(self) -> str:
        """The name of the database, for messages."""

    def load(self) -> dict[str, str]:
        """Return all texts."""

    def save(self, changes: Mapping[str, str | None]) -> None:
        """Set or delete (None) texts, atomically and durably.

        Raises:
            FencedError: Another process owns the database now.
        """

    def close(self) -> None:
        """Close the database."""


class StoredState:
    """The texts in a database, which this process owns from now on.

    Args:
        where: The file of SQLite, or the URL of PostgreSQL.

    Raises:
        UnusableError: See `open_database`, for this and other errors.
    """

    def __init__(self, where: Path | str) -> None:
        self._database = open_database(where, "quotas", TABLES, VERSION)

    @property
    def place(self) -> str:
        return self._database.place

    def load(self) -> dict[str, str]:
        return {row["key"]: row["value"] for row in self._database.rows(sa.select(TEXTS))}

    def save(self, changes: Mapping[str, str | None]) -> None:
        keys = [{"name": key} for key in changes]
        rows = [{"key": key, "value": value} for key, value in changes.items() if value is not None]
        with self._database.transaction() as db:
            # A deletion and an insertion: SQLite and PostgreSQL have different statements for an upsert.
            if keys:
                db.execute(sa.delete(TEXTS).where(TEXTS.c.key == sa.bindparam("name")), keys)
            if rows:
                db.execute(sa.insert(TEXTS), rows)

    def close(self) -> None:
        self._database.close()
