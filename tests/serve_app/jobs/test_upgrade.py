"""Batches that an earlier version has begun go on.

`version6` is a folder as that version left it when it was killed between an append and its commit: five of
the 12 rows of batch `b` are done, and its output has one line more than is committed; `c` has no result yet.
"""

import asyncio
import shutil
import sqlite3
from pathlib import Path
from uuid import uuid4

import pytest
from pydantic_core import from_json

from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Content, Contents, DiskContent
from serve_app.jobs.key_rules import KeyRules
from serve_app.jobs.storage import adopt_results, delete_noted
from serve_app.jobs.store import Store
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.helpers import NOW, all_ended, bytes_of, commits, limits_of

OLD = Path(__file__).parent / "version6"

DONE = {f"b-{number}" for number in range(5)}
REFUSED = {"b-2", "b-9"}
COMMITTED, FIRST = 812, 203
"""Committed bytes of the output of `b`, and those of its first line."""


def restored(folder: Path) -> Path:
    """Return a folder as the earlier version left it."""
    shutil.copytree(OLD / "files", folder / "files")
    (folder / "drafts").mkdir()
    database = sqlite3.connect(folder / "batches.db")
    database.executescript((OLD / "batches.sql").read_text())
    database.close()
    return folder


def in_object_storage(folder: Path, epoch: int) -> Contents:
    """Return the contents of a folder as the earlier version had them in object storage."""
    pytest.importorskip("fsspec", reason="fsspec is not installed here (pip install -e '.[storage]')")
    import fsspec

    from serve_app.jobs.object_storage import Objects

    root = f"memory://{uuid4().hex}"
    fs = fsspec.filesystem("memory")
    for id in ("in-b", "in-c"):
        fs.pipe_file(f"{root}/files/{id}", (folder / "files" / id).read_bytes())
    output = (folder / "files" / "file-b-out").read_bytes()
    for start, end in ((0, FIRST), (FIRST, COMMITTED), (COMMITTED, len(output))):
        fs.pipe_file(f"{root}/parts/file-b-out/{start:020d}", output[start:end])
    fs.pipe_file(f"{root}/parts/file-b-err/{0:020d}", (folder / "files" / "file-b-err").read_bytes())
    shutil.rmtree(folder / "files")
    return Content(folder, epoch, Objects(root))


@pytest.mark.parametrize("where", ["disk", "object storage"])
@pytest.mark.parametrize("cancelled", [False, True])
async def test_a_batch_of_version_6_goes_on(where: str, cancelled: bool, tmp_path: Path) -> None:
    folder = restored(tmp_path / "batches")
    store = Store(folder)
    content: Contents = Content(folder, store.epoch, DiskContent(folder))
    if where == "object storage":
        content = in_object_storage(folder, store.epoch)
    delete_noted(store, content)
    for _ in range(2):
        # The process may end in between.
        adopt_results(store, content)
    batch = store.batch("b")
    assert (batch.completed, batch.failed, batch.output_bytes) == (4, 1, COMMITTED)
    before = bytes_of(content, batch.output_file, COMMITTED)
    if cancelled:
        store.move("b", "cancelling", NOW)
    engine = Engine(lambda id: 400 if id in REFUSED else 200)
    runner = BatchRunner(
        store, content, engine, KeyRules({"demo"}, limits_of()), clock=lambda: NOW, tick_s=0.01
    )
    with commits() as committed:
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run())
            await all_ended(store, committed)
            runner.stop()
    rows = {f"b-{number}" for number in range(12)}
    assert set(engine.tries) == ({"c-0", "c-1", "c-2"} if cancelled else {"c-0", "c-1", "c-2"} | rows - DONE)
    batch = store.batch("b")
    assert batch.state == ("cancelled" if cancelled else "completed")
    output = bytes_of(content, batch.output_file, batch.output_bytes)
    errors = bytes_of(content, batch.error_file, batch.error_bytes)
    assert output.startswith(before)
    found = [from_json(line)["custom_id"] for line in [*output.splitlines(), *errors.splitlines()]]
    assert sorted(found) == sorted(rows)
    assert (content.size(batch.output_file), content.size(batch.error_file)) == (len(output), len(errors))
    assert store.batch("c").state == "completed"
    store.close()
