from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from serve_app.batches.database import Database, SQLite
from tests.serve_app.batches.server import Server, start

Place = Callable[[], Path | Database]


def database_at(place: Place) -> Database:
    """Return the database of a place."""
    where = place()
    return SQLite(where) if isinstance(where, Path) else where


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server; the test is skipped where there is none."""
    server = start()
    yield server
    server.stop()


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Opens the place of a store."""
    if request.param == "SQLite":
        return lambda: tmp_path
    url = request.getfixturevalue("postgres").database()

    def connect() -> Database:
        from serve_app.batches.postgres import Postgres

        return Postgres(url)

    return connect
