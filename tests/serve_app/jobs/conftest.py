import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import openai
import pytest

from serve_app.jobs import failpoints
from tests.progress import STILL_S
from tests.serve_app.jobs.server import Server
from tests.serve_app.jobs.site import Site

Place = Callable[[], Path | str]


@pytest.fixture(params=["SQLite", "PostgreSQL"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Returns the place of a store."""
    if request.param == "SQLite":
        return lambda: tmp_path
    found: Place = request.getfixturevalue("postgres_place")
    return found


@pytest.fixture
def postgres_place(postgres: Server) -> Place:
    """Returns the URL of a database in PostgreSQL."""
    url = postgres.database()
    return lambda: url


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
