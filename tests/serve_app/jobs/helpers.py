"""Files and batches for the tests of this folder."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.jobs import failpoints
from serve_app.jobs.content import Content, DiskContent
from serve_app.jobs.intake import read_rows
from serve_app.jobs.models import Batch, File
from serve_app.jobs.storage import add_file
from serve_app.jobs.store import Store
from serve_app.rows.rows import Result, Row, RowTokens
from serve_app.settings.batches import BatchesSettings
from tests.progress import STILL_S

CHAT = "/v1/chat/completions"
NOW = 1_800_000_000
DAY_S = 86_400


def limits_of(**values: Any) -> BatchesSettings:
    """Return the settings of the batches, with some limits."""
    return BatchesSettings(folder="/batches").model_copy(update=values)


def row(custom_id: str, /, **fields: Any) -> JSON:
    """Return a row of an input file; `fields` replace those of a valid one, None leaves one out."""
    body = {"model": "demo", "messages": [{"role": "user", "content": custom_id}]}
    whole = {"custom_id": custom_id, "method": "POST", "url": CHAT, "body": body} | fields
    return {name: value for name, value in whole.items() if value is not None}


def text_of(*rows: JSON | bytes) -> bytes:
    """Return the text of an input file."""
    return b"".join((line if isinstance(line, bytes) else to_json(line)) + b"\n" for line in rows)


def file_of(id: str, tenant: str = "anna", size: int = 1, **fields: Any) -> File:
    """Return a file for batches."""
    values: JSON = {"filename": f"{id}.jsonl", "purpose": "batch", "created_at": NOW, "expires_at": None}
    return File(id=id, tenant=tenant, bytes=size, **(values | fields))


def batch_of(id: str, input_file: str, tenant: str = "anna", **fields: Any) -> Batch:
    """Return a batch that waits for its validation."""
    values: JSON = {
        "endpoint": CHAT,
        "output_file": f"file-{id}-out",
        "error_file": f"file-{id}-err",
        "completion_window": "24h",
        "metadata": {},
        "retention_s": DAY_S,
        "created_at": NOW,
        "expires_at": NOW + DAY_S,
    }
    return Batch(id=id, tenant=tenant, input_file=input_file, **(values | fields))


def result_of(row: Row, *, is_error: bool = False) -> Result:
    """Return the result of a row: a line with its `custom_id`."""
    line = to_json({"custom_id": from_json(row.text)["custom_id"]}) + b"\n"
    return Result(row.line, line, is_error, tokens=RowTokens() if is_error else RowTokens(5, 0, 2))


def put(store: Store, content: Content[Any], id: str, text: bytes, tenant: str = "anna") -> None:
    """Store a file."""
    draft = content.draft()
    draft.write(text)
    with draft.open() as file:
        plan = read_rows(file, limits_of())
    add_file(store, content, draft, file_of(id, tenant, len(text)), plan, limits_of())


@contextmanager
def failing_at(point: str) -> Iterator[None]:
    """Let the disk fail at a failpoint."""

    def fail(reached: str) -> None:
        if reached == point:
            raise OSError("the disk fails")

    failpoints.hook = fail
    try:
        yield
    finally:
        failpoints.hook = None


@contextmanager
def commits() -> Iterator[asyncio.Event]:
    """Yield an event that is set at every write."""
    loop, event = asyncio.get_running_loop(), asyncio.Event()

    def reached(_: str) -> None:
        with suppress(RuntimeError):
            loop.call_soon_threadsafe(event.set)

    failpoints.hook = reached
    try:
        yield event
    finally:
        failpoints.hook = None


async def all_ended(store: Store, committed: asyncio.Event) -> None:
    """Wait until no batch is open, with an event of `commits`."""
    async with asyncio.timeout(STILL_S):
        while True:
            committed.clear()
            if not store.open_batches():
                return
            await committed.wait()


def on_disk(folder: Path, epoch: int = 1) -> Content[Path]:
    """Return contents on the disk."""
    return Content(folder, epoch, DiskContent(folder))


def opened(folder: Path) -> tuple[Store, Content[Path]]:
    """Return a store and its contents."""
    store = Store(folder)
    return store, on_disk(folder, store.epoch)


def bytes_of(content: Content[Any], id: str, size: int) -> bytes:
    """Return the first bytes of a content."""
    return b"".join(content.pieces(id, size))


def known_contents(store: Store) -> set[str]:
    """Return the ids of the contents of the tenants' files, and of the results of the open batches."""
    files = {file.id for tenant in ("anna", "ben") for file in store.files(tenant).items}
    return files | {id for batch in store.open_batches() for id in (batch.output_file, batch.error_file)}


def ids_on_disk(content: Content[Path]) -> set[str]:
    """Return the ids of all contents on the disk."""
    return {path.name for path in content.path("any").parent.iterdir()}


def lose_connections(url: str) -> None:
    """Break all connections to a database in PostgreSQL, as a server does that takes a machine for dead."""
    import psycopg

    with psycopg.connect(url, autocommit=True) as connection:
        connection.execute(
            "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
            "WHERE datname = current_database() AND pid <> pg_backend_pid()"
        )
