"""Contents in an object storage, which is in memory."""

import asyncio
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic_core import from_json

from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Content
from serve_app.jobs.errors import StoreError
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.service import BatchService
from serve_app.jobs.store import Store
from serve_app.rows.pacing import Fixed
from serve_app.settings.batches import BatchesSettings
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import NOW, all_ended, batch_of, commits, limits_of, put, row, text_of
from tests.serve_app.jobs.test_service import get

pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")

from serve_app.jobs.object_storage import Objects
from tests.progress import STILL_S
from tests.serve_app.jobs.buffered_storage import PROTOCOL, BufferedStorage

LIMIT_S = STILL_S


@pytest.fixture(params=["memory", PROTOCOL])
def url(request: pytest.FixtureRequest) -> str:
    return f"{request.param}://{uuid4().hex}"


def content_at(url: str, folder: Path) -> Content[None]:
    return Content(folder, 1, Objects(url))


def test_a_storage_that_fails_midway_is_an_error_of_the_system(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = content_at(f"{PROTOCOL}://{uuid4().hex}", tmp_path)
    draft = content.draft()
    draft.write(b"one\n")
    content.keep(draft, "a")
    monkeypatch.setattr(BufferedStorage, "fails", True)
    with pytest.raises(OSError, match="can't be reached"):
        _ = [*content.pieces("a", 4)]


def test_a_storage_that_is_not_known_is_told() -> None:
    with pytest.raises(StoreError, match="nowhere"):
        Objects("nowhere://x")


@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_reads_its_input_twice_at_most(cancelled: bool, tmp_path: Path) -> None:
    """Once to send its rows, and once for those without a result."""
    content = content_at(f"{PROTOCOL}://{uuid4().hex}", tmp_path)
    store = Store(tmp_path)
    text = text_of(*(row(str(number)) for number in range(1_500)))
    put(store, content, "in", text)
    store.add_batch(batch_of("b", "in"), 1)
    engine = Engine()
    runner = BatchRunner(
        store,
        content,
        engine,
        KeyRules({"demo"}, limits_of()),
        concurrency=lambda: Fixed(32),
        clock=lambda: NOW,
    )
    BufferedStorage.fetched_of.clear()
    with commits() as committed:
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            if cancelled:
                await engine.until(lambda: len(engine.sent) > 400)
                store.move("b", "cancelling", NOW)
                runner.notice()
            await all_ended(store, committed)
            runner.stop()
    assert BufferedStorage.fetched_of["in"] <= (2 if cancelled else 1) * len(text)
    store.close()


async def test_a_batch_runs_with_its_contents_there(url: str, tmp_path: Path) -> None:
    settings = BatchesSettings(folder=str(tmp_path), content=url)
    engine = Engine(lambda id: 400 if id == "bad" else 200)
    with commits() as committed:
        async with asyncio.timeout(LIMIT_S):
            service = await BatchService.open(settings, engine, {"demo"})
            content = content_at(url, tmp_path / "client")
            put(service._store, content, "in", text_of(row("a"), row("bad"), row("c")), "default")
            batch = batch_of("batch_1", "in", "default", expires_at=10**11)
            service._store.add_batch(batch, 1)
            while (answer := from_json(await get(service, "/v1/batches/batch_1")))["status"] != "completed":
                await committed.wait()
                committed.clear()
            output = await get(service, f"/v1/files/{answer['output_file_id']}/content")
            errors = await get(service, f"/v1/files/{answer['error_file_id']}/content")
            await service.close(5.0)
    assert {from_json(line)["custom_id"] for line in output.splitlines()} == {"a", "c"}
    assert [from_json(line)["custom_id"] for line in errors.splitlines()] == ["bad"]
    assert engine.tries == {"a": 1, "bad": 1, "c": 1}
