import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path

import openai
import pytest

from serve_app.jobs import failpoints
from serve_app.jobs.db import Database, SQLite
from tests.progress import STILL_S
from tests.serve_app.jobs.server import Server, start
from tests.serve_app.jobs.site import Site

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
    found: Place = request.getfixturevalue("postgres_place")
    return found


@pytest.fixture
def postgres_place(postgres: Server) -> Place:
    """Opens a database in PostgreSQL."""
    url = postgres.database()

    def connect() -> Database:
        from serve_app.jobs.db import Postgres

        return Postgres(url)

    return connect


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    """The routes and a runner that runs."""
    site = Site(tmp_path)
    running = asyncio.create_task(site.runner.run())
    yield site
    site.engine.go.set()
    site.runner.stop()
    async with asyncio.timeout(STILL_S):
        await running
    failpoints.hook = None
    site.store.close()


@pytest.fixture
def client(site: Site) -> openai.AsyncOpenAI:
    """OpenAI's client of the tenant anna."""
    return site.client("anna")
