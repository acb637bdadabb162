"""The routes of files, called by OpenAI's client."""

import asyncio
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import openai
import pytest

from serve_app.jobs import failpoints
from serve_app.jobs.db import SQLite
from serve_app.jobs.errors import DatabaseError
from serve_app.jobs.intake import FORM_BYTES
from tests.progress import STILL_S
from tests.serve_app.jobs.helpers import ids_on_disk, row
from tests.serve_app.jobs.site import LIMITS, Site, create, upload

BOUNDARY = "b0undary"


def form(*parts: tuple[str, bytes]) -> bytes:
    """Return a multipart body of parts: the parameters of their `Content-Disposition`, and their data."""
    text = b"".join(
        f"--{BOUNDARY}\r\nContent-Disposition: form-data; {what}\r\n\r\n".encode() + data + b"\r\n"
        for what, data in parts
    )
    return text + f"--{BOUNDARY}--\r\n".encode()


FILE = ('name="file"; filename="in"', b"{}")
PURPOSE = ('name="purpose"', b"batch")


async def test_a_deleted_file_is_gone(site: Site, client: openai.AsyncOpenAI) -> None:
    site.engine.go.clear()
    file = await upload(client, row("a"))
    batch = await create(client, file)
    with pytest.raises(openai.ConflictError, match="has not ended"):
        await client.files.delete(file.id)
    site.engine.go.set()
    await site.ended(client, batch.id)
    assert (await client.files.delete(file.id)).deleted is True
    assert file.id not in ids_on_disk(site.content)
    for call in (client.files.retrieve(file.id), client.files.content(file.id), client.files.delete(file.id)):
        with pytest.raises(openai.NotFoundError, match="There is no file"):
            await call
    with pytest.raises(openai.BadRequestError, match="input_file_id: there is no file"):
        await create(client, file)


async def test_uploads_are_limited(site: Site, client: openai.AsyncOpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as caught:
        await upload(client, b"x" * LIMITS.max_file_bytes)
    assert caught.value.status_code == 413
    for _ in range(3):
        await upload(client, b"x" * (LIMITS.max_file_bytes - 1))
    with pytest.raises(openai.BadRequestError, match="would have more than"):
        await upload(client, b"x")
    assert len(ids_on_disk(site.content)) == 3
    assert list((site.folder / "drafts").iterdir()) == []


async def test_uploads_under_way_are_limited_together(site: Site, client: openai.AsyncOpenAI) -> None:
    site.limits = replace(LIMITS, max_tenant_bytes=LIMITS.max_file_bytes)
    counted, go = asyncio.Event(), asyncio.Event()
    body = form(PURPOSE, ('name="file"; filename="in"', b"x" * 600_000))

    async def slowly() -> AsyncIterator[bytes]:
        yield body[:-10]
        counted.set()
        await go.wait()
        yield body[-10:]

    async with site.http() as http, asyncio.timeout(STILL_S):
        http.headers["authorization"] = "Bearer anna"
        kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        first = asyncio.create_task(http.post("/v1/files", content=slowly(), headers=kind))
        await counted.wait()
        with pytest.raises(openai.BadRequestError, match="under way"):
            await upload(client, b"x" * 600_000)
        assert len(list((site.folder / "drafts").iterdir())) == 1
        await upload(site.client("ben"), b"x" * 600_000)
        go.set()
        assert (await first).status_code == 200
        await client.files.delete((await first).json()["id"])
        await upload(client, b"x" * 600_000)


async def test_the_number_of_uploads_is_limited(site: Site, client: openai.AsyncOpenAI) -> None:
    site.limits = replace(LIMITS, max_files=2)
    files = [await upload(client, row("a")) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="has 2 files, which is the limit; delete some first"):
        await upload(client, row("a"))
    assert len(ids_on_disk(site.content)) == 2
    await client.files.delete(files[0].id)
    await upload(client, row("a"))


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (form(FILE), 400, "purpose"),
        (form(PURPOSE), 400, "file: required"),
        (form(('name="purpose"', b"vision"), FILE), 400, "purpose"),
        (form(PURPOSE, FILE, FILE), 400, "one file"),
        (form(PURPOSE, ('name="other"; filename="in"', b"")), 400, "one file"),
        (form(PURPOSE, FILE)[:-20], 400, "ends early"),
        (b"no form at all", 400, "can't be read"),
        (form(('name="x"', b"x" * (FORM_BYTES + 1)), FILE), 413, "more than 65536"),
        (form(PURPOSE, ('name="file"; filename="in"', b"x" * (LIMITS.max_file_bytes + 1))), 413, "larger"),
        (form(PURPOSE, FILE, ('name="expires_after[seconds]"', b"5")), 400, "expires_after"),
    ],
)
async def test_a_wrong_form_leaves_nothing(site: Site, body: bytes, status: int, message: str) -> None:
    async def pieces() -> AsyncIterator[bytes]:
        for start in range(0, len(body), 50_000):
            yield body[start : start + 50_000]

    async with site.http() as http:
        kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        answer = await http.post("/v1/files", content=pieces(), headers=kind)
        assert (answer.status_code, message in answer.json()["error"]["message"]) == (status, True), (
            answer.text
        )
        assert (await http.post("/v1/files", content=b"{}")).status_code == 400
    assert ids_on_disk(site.content) == set()
    assert list((site.folder / "drafts").iterdir()) == []


async def test_fields_may_come_behind_the_file(site: Site) -> None:
    async with site.http() as http:
        kind = {"content-type": f"multipart/form-data; boundary={BOUNDARY}"}
        answer = await http.post("/v1/files", content=form(FILE, PURPOSE), headers=kind)
    assert answer.status_code == 200
    assert site.content.path(answer.json()["id"]).read_bytes() == b"{}"


async def test_a_part_of_a_content_can_be_asked_for(site: Site, client: openai.AsyncOpenAI) -> None:
    file = await upload(client, b"0123456789")
    async with site.http() as http:
        headers = {"authorization": "Bearer anna", "range": "bytes=3-5"}
        answer = await http.get(f"/v1/files/{file.id}/content", headers=headers)
    assert (answer.status_code, answer.content) == (206, b"345")


async def test_a_content_that_got_lost_is_told(site: Site, client: openai.AsyncOpenAI) -> None:
    file = await upload(client, row("a"))
    site.content.path(file.id).unlink()
    with pytest.raises(openai.InternalServerError, match="got lost"):
        await client.files.content(file.id)


async def test_a_database_that_is_gone_takes_no_uploads(
    site: Site, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> Any:
        raise DatabaseError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(SQLite, "rows", gone)
        patch.setattr(SQLite, "transaction", gone)
        for _ in range(3):
            with pytest.raises(openai.InternalServerError, match="disk or database fails"):
                await upload(client, row("a"))
    assert ids_on_disk(site.content) == set()
    assert list((site.folder / "drafts").iterdir()) == []


@pytest.mark.parametrize("point", ["content.renamed", "store.commit", "store.committed"])
async def test_an_upload_that_fails_late_leaves_nothing(
    site: Site, client: openai.AsyncOpenAI, point: str
) -> None:
    def fail(reached: str) -> None:
        # The runner has commits of its own.
        if reached == point and threading.current_thread().name.startswith("batches-api"):
            failpoints.hook = None
            raise OSError if point == "content.renamed" else DatabaseError

    failpoints.hook = fail
    with pytest.raises(openai.InternalServerError, match="disk or database fails"):
        await upload(client, row("a"))
    assert ids_on_disk(site.content) == set()
    assert [found async for found in client.files.list()] == []
