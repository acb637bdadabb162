"""The state in PostgreSQL: what happens when the server goes."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from serve_app.jobs.service import BatchService
from serve_app.jobs.store import Store
from serve_app.settings.batches import BatchesSettings
from serve_app.system.database import DatabaseError
from tests.progress import STILL_S
from tests.serve_app.jobs import server
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import batch_of, commits, file_of, on_disk, put, row, text_of
from tests.serve_app.jobs.server import Server
from tests.serve_app.jobs.test_service import get

LIMIT_S = STILL_S


@pytest.fixture
def own() -> Iterator[Server]:
    """A server that the test may kill."""
    made = server.start()
    yield made
    made.stop()


def test_a_server_that_was_gone_is_used_again(own: Server) -> None:
    store = Store(own.database())
    store.add_file(file_of("in"))
    own.kill()
    for _ in range(2):
        with pytest.raises(DatabaseError, match="postgresql:///test_0"):
            store.add_file(file_of("other"))
        with pytest.raises(DatabaseError):
            store.file("anna", "in")
    own.start()
    # The first call may still meet the connection that broke.
    assert store.file("anna", "in") == file_of("in")
    store.add_file(file_of("other"))
    assert [file.id for file in store.files("anna").items] == ["other", "in"]
    store.close()


def test_a_query_to_a_vanished_machine_fails_like_an_idle_connection(postgres: Server) -> None:
    store = Store(postgres.database())
    with store._transaction() as connection:
        dbapi: Any = connection.connection.dbapi_connection
        found = dbapi.info.get_parameters()
    idle, interval, count = (int(found[f"keepalives_{name}"]) for name in ("idle", "interval", "count"))
    assert int(found["tcp_user_timeout"]) == 1000 * (idle + interval * count)
    store.close()


async def test_batches_outlast_the_server(own: Server, tmp_path: Path) -> None:
    url = own.database()
    settings = BatchesSettings(folder=str(tmp_path), database=url)
    engine = Engine()
    engine.go.clear()
    with commits() as committed:
        async with asyncio.timeout(LIMIT_S):
            service = await BatchService.open(settings, engine, {"demo"})
            store = service._store
            put(store, on_disk(tmp_path, store.epoch), "in", text_of(row("a"), row("b")), "default")
            store.add_batch(batch_of("batch_1", "in", "default", expires_at=10**11), 1)
            await engine.until(lambda: engine.running == 2)
            await asyncio.to_thread(own.kill)
            engine.go.set()
            answer = json.loads(await get(service, "/v1/batches/batch_1"))
            assert answer["error"]["code"] == 503
            await asyncio.to_thread(own.start)
            while json.loads(await get(service, "/v1/batches/batch_1")).get("status") != "completed":
                await committed.wait()
                committed.clear()
            await service.close(5.0)
    assert engine.tries == {"a": 1, "b": 1}


async def test_the_url_may_be_in_the_environment(
    postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BATCHES_URL", postgres.database())
    settings = BatchesSettings(folder=str(tmp_path), database_env="BATCHES_URL")
    service = await BatchService.open(settings, Engine(), {"demo"})
    await service.close(1.0)
    assert not (tmp_path / "batches.db").exists()
