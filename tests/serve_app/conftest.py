from collections.abc import Iterator

import pytest

from tests.serve_app.jobs.server import Server, start


@pytest.fixture(scope="session")
def postgres() -> Iterator[Server]:
    """A PostgreSQL server; the test is skipped where there is none."""
    server = start()
    yield server
    server.stop()
