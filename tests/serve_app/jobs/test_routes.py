"""The routes of files and batches, called by OpenAI's client."""

import asyncio
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch as OpenAIBatch
from openai.types import FileObject
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.auth.key_store import Caller
from serve_app.auth.keys import Key, hash_key
from serve_app.jobs import failpoints
from serve_app.jobs.models import ENDED
from serve_app.jobs.routes import BatchAPI
from serve_app.jobs.store import Store
from serve_app.rows.rows import Result
from serve_app.settings.batches import DAY_S
from serve_app.system.database import Database, DatabaseError
from tests.progress import STILL_S
from tests.serve_app.jobs.conftest import Place
from tests.serve_app.jobs.helpers import (
    CHAT,
    NOW,
    batch_of,
    failing_at,
    file_of,
    ids_on_disk,
    limits_of,
    on_disk,
    row,
    text_of,
)
from tests.serve_app.jobs.site import LIMITS, Site, client_of, create, http_of, upload


async def test_requests_are_answered_while_the_threads_of_the_loop_are_busy(
    site: Site, client: openai.AsyncOpenAI
) -> None:
    file = await upload(client, row("a"))
    free = threading.Event()
    busy = [asyncio.create_task(asyncio.to_thread(free.wait)) for _ in range(40)]
    try:
        async with asyncio.timeout(STILL_S):
            assert (await client.files.retrieve(file.id)).id == file.id
            assert [found async for found in client.batches.list()] == []
    finally:
        free.set()
        await asyncio.gather(*busy)


async def test_a_database_that_fails_is_told(site: Site, client: openai.AsyncOpenAI) -> None:
    with (
        failing_at("content.sync"),
        pytest.raises(openai.InternalServerError, match="disk or database fails"),
    ):
        await upload(client, row("a"))
    assert list((site.folder / "drafts").iterdir()) == []
    await upload(client, row("a"))


async def test_a_nul_in_a_request_is_no_failure_of_the_database(place: Place, tmp_path: Path) -> None:
    store = Store(place())
    app = BatchAPI(store, on_disk(tmp_path), lambda: None, limits=lambda key: limits_of()).app()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://batches/v1") as http:
        fields = {"input_file_id": "\0", "endpoint": CHAT, "completion_window": "24h"}
        answers = [
            await http.get("/files/%00"),
            await http.get("/files?after=%00"),
            await http.get("/files?purpose=%00"),
            await http.delete("/files/%00"),
            await http.get("/batches/%00"),
            await http.get("/batches?after=%00"),
            await http.post("/batches", json=fields),
        ]
    assert [answer.status_code for answer in answers] == [404, 400, 200, 404, 404, 400, 400]
    store.close()


async def test_upload_create_poll_download(site: Site, client: openai.AsyncOpenAI) -> None:
    text = text_of(row("a"), row("bad"), row("b"))
    file = await upload(client, text.rstrip(b"\n"))
    assert (file.bytes, file.filename, file.purpose) == (len(text), "in.jsonl", "batch")
    assert (file.object, file.status, file.created_at) == ("file", "processed", NOW)
    assert file.expires_at == NOW + 30 * DAY_S
    assert (await client.files.content(file.id)).content == text

    batch = await create(client, file, metadata={"night": "1"})
    assert (batch.object, batch.status, batch.endpoint) == ("batch", "validating", CHAT)
    assert (batch.completion_window, batch.expires_at) == ("24h", NOW + DAY_S)
    assert batch.output_file_id is None

    batch = await site.ended(client, batch.id)
    assert (batch.status, batch.errors, batch.model) == ("completed", None, "demo")
    assert batch.request_counts is not None
    assert batch.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    assert batch.metadata == {"night": "1"}
    assert batch.usage is not None
    assert batch.usage.model_dump() == {
        "input_tokens": 6,
        "input_tokens_details": {"cached_tokens": 0},
        "output_tokens": 4,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": 10,
    }
    assert batch.in_progress_at == batch.finalizing_at == batch.completed_at == NOW
    assert batch.output_file_id
    assert batch.error_file_id
    output = (await client.files.content(batch.output_file_id)).text.splitlines()
    assert {from_json(line)["custom_id"] for line in output} == {"a", "b"}
    errors = (await client.files.content(batch.error_file_id)).text.splitlines()
    assert [from_json(line)["response"]["status_code"] for line in errors] == [400]
    result = await client.files.retrieve(batch.output_file_id)
    assert (result.purpose, result.filename) == ("batch_output", f"{batch.id}_output.jsonl")


async def test_the_output_is_named_once_the_batch_has_ended(site: Site, client: openai.AsyncOpenAI) -> None:
    held, reach = True, failpoints.hook
    finalizing = asyncio.Event()
    loop = asyncio.get_running_loop()

    def hold(point: str) -> None:
        assert reach is not None
        reach(point)
        open = site.store.open_batches() if point == "content.rename" and held else []
        if open and open[0].state == "finalizing":
            loop.call_soon_threadsafe(finalizing.set)
            raise OSError("the disk fails")

    failpoints.hook = hold
    batch = await create(client, await upload(client, row("a"), row("bad")))
    async with asyncio.timeout(STILL_S):
        await finalizing.wait()
    batch = await client.batches.retrieve(batch.id)
    assert (batch.status, batch.output_file_id, batch.error_file_id) == ("finalizing", None, None)
    held = False
    batch = await site.ended(client, batch.id)
    assert batch.status == "completed"
    assert batch.output_file_id
    output = (await client.files.content(batch.output_file_id)).text
    assert [from_json(line)["custom_id"] for line in output.splitlines()] == ["a"]


async def test_lists_have_pages(site: Site, client: openai.AsyncOpenAI) -> None:
    files = [await upload(client, row("a")) for _ in range(5)]
    batches = [await create(client, file) for file in files[:3]]
    page = await client.files.list(limit=2)
    assert ([file.id for file in page.data], page.has_more) == ([files[4].id, files[3].id], True)
    assert [file.id async for file in client.files.list(limit=2, purpose="batch")] == [
        file.id for file in reversed(files)
    ]
    assert [file.id async for file in client.files.list(order="asc", after=files[2].id, purpose="batch")] == [
        files[3].id,
        files[4].id,
    ]
    assert [batch.id async for batch in client.batches.list(limit=1)] == [
        batch.id for batch in reversed(batches)
    ]
    for wrong in (client.files.list(after="file-x"), client.batches.list(after="batch_x")):
        with pytest.raises(openai.BadRequestError, match="after"):
            await wrong
    with pytest.raises(openai.BadRequestError, match="1 to 100"):
        await client.batches.list(limit=101)
    for key, ids in (("anna", [file.id for file in reversed(files)]), ("ben", [])):
        async with site.http() as http:
            found = (
                await http.get("/v1/files?purpose=batch", headers={"authorization": f"Bearer {key}"})
            ).json()
        assert [FileObject.model_validate(one, strict=True).id for one in found["data"]] == ids
        ends = (ids[0], ids[-1]) if ids else (None, None)
        assert (found["first_id"], found["last_id"], found["has_more"]) == (*ends, False)


async def test_a_tenant_sees_its_own_only(site: Site, client: openai.AsyncOpenAI) -> None:
    file = await upload(client, row("a"))
    batch = await create(client, file)
    other = site.client("ben")
    assert [found async for found in other.files.list()] == []
    assert [found async for found in other.batches.list()] == []
    for call in (
        other.files.retrieve(file.id),
        other.files.content(file.id),
        other.files.delete(file.id),
        other.batches.retrieve(batch.id),
        other.batches.cancel(batch.id),
    ):
        with pytest.raises(openai.NotFoundError):
            await call
    with pytest.raises(openai.BadRequestError):
        await create(other, file)


async def test_a_key_has_its_tenant_and_weight(site: Site, client: openai.AsyncOpenAI) -> None:
    key = Key(name="k", sha256=hash_key(b"secret"), tenant="team", weight=3.0)
    caller = Caller(key)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await site.app(scope | {"caller": caller}, receive, send)

    transport = httpx.ASGITransport(app)
    async with httpx.AsyncClient(transport=transport, base_url="http://batches") as http:
        form = {"purpose": "batch"}
        answer = await http.post("/v1/files", data=form, files={"file": ("in", text_of(row("a")))})
        assert answer.status_code == 200
        assert (await http.get("/v1/files", headers={"x-tenant": "other"})).status_code == 403
        fields = {"input_file_id": answer.json()["id"], "endpoint": CHAT, "completion_window": "24h"}
        batch = (await http.post("/v1/batches", json=fields)).json()
    assert [file.id for file in site.store.files("team").items] == [answer.json()["id"]]
    assert site.store.batch(batch["id"], "team").weight == 3.0


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
    site.limits = LIMITS.model_copy(update={"max_tenant_bytes": LIMITS.max_file_bytes})
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


async def test_the_limits_of_a_tenant_count_nothing_else(place: Place, tmp_path: Path) -> None:
    store = Store(place())
    limits = limits_of(max_files=2, max_tenant_bytes=1000, max_open_batches=1)
    app = BatchAPI(store, on_disk(tmp_path), lambda: None, limits=lambda key: limits).app()
    anna, ben = client_of(app, "anna"), client_of(app, "ben")
    files = [await upload(anna, row("a")) for _ in range(2)]
    with pytest.raises(openai.BadRequestError, match="has 2 files, which is the limit; delete files first"):
        await upload(anna, row("a"))
    large = await upload(ben, b"x" * 900)
    with pytest.raises(openai.BadRequestError, match="would have more than"):
        await upload(ben, b"x" * 200)
    for tenant, file in ((anna, files[0]), (ben, large)):
        await tenant.files.delete(file.id)
        await upload(tenant, b"x" * 200)
    assert store.noted_contents() == []
    batch = await create(anna, files[1])
    with pytest.raises(openai.BadRequestError, match="1 batches of this tenant are open"):
        await create(anna, files[1])
    store.move(batch.id, "in_progress", NOW, total=1)
    store.record({batch.id: [Result(1, b"{}\n", False)]})
    store.move(batch.id, "finalizing", NOW)
    store.end(batch.id, "completed", NOW)
    await create(anna, files[1])
    # The output of the batch is a file too, and does not count.
    newest, *_ = [file.id async for file in anna.files.list(purpose="batch")]
    await anna.files.delete(newest)
    await upload(anna, row("a"))
    store.close()


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
        (form(('name="x"', b"x" * 65_537), FILE), 413, "more than 65536"),
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
    with pytest.raises(openai.InternalServerError, match="is lost"):
        await client.files.content(file.id)


async def test_a_database_that_is_gone_takes_no_uploads(
    site: Site, client: openai.AsyncOpenAI, monkeypatch: pytest.MonkeyPatch
) -> None:
    def gone(*_: object) -> Any:
        raise DatabaseError("connection refused")

    with monkeypatch.context() as patch:
        patch.setattr(Database, "rows", gone)
        patch.setattr(Database, "transaction", gone)
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


async def test_errors_of_the_input_have_line_numbers(site: Site, client: openai.AsyncOpenAI) -> None:
    batch = await create(client, await upload(client, row("a"), b"{", row("c", url="/v1/embeddings")))
    batch = await site.ended(client, batch.id)
    assert (batch.status, batch.failed_at) == ("failed", NOW)
    assert batch.errors is not None
    assert batch.errors.data is not None
    assert [(error.code, error.line, error.param) for error in batch.errors.data] == [
        ("invalid_json_line", 2, None),
        ("mismatched_url", 3, "url"),
    ]


async def test_cancel(site: Site, client: openai.AsyncOpenAI) -> None:
    site.engine.go.clear()
    batch = await create(client, await upload(client, *(row(str(number)) for number in range(50))))
    await site.engine.until(lambda: site.engine.running > 0)
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    assert (await client.batches.cancel(batch.id)).status == "cancelling"
    site.engine.go.set()
    batch = await site.ended(client, batch.id)
    assert (batch.status, batch.cancelled_at) == ("cancelled", NOW)
    assert batch.request_counts is not None
    assert batch.request_counts.completed + batch.request_counts.failed == 50
    with pytest.raises(openai.ConflictError, match="cancelled can't be cancelled") as caught:
        await client.batches.cancel(batch.id)
    assert caught.value.response.headers["x-should-retry"] == "false"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/images"}, "endpoint"),
        ({"completion_window": "30m"}, "completion_window"),
        ({"completion_window": "8d"}, "completion_window"),
        ({"metadata": {"a": "x" * 513}}, "metadata"),
        ({"metadata": {str(number): "" for number in range(17)}}, "metadata"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 5}}, "output_expires_after"),
        ({"extra_body": {"colour": "red"}}, "colour"),
    ],
)
async def test_a_wrong_field_is_named(
    site: Site, client: openai.AsyncOpenAI, fields: JSON, param: str
) -> None:
    file = await upload(client, row("a"))
    with pytest.raises(openai.BadRequestError) as caught:
        await create(client, file, **fields)
    assert caught.value.param == param
    assert caught.value.type == "invalid_request_error"
    assert site.store.open_batches() == []


async def test_windows_and_expiry_of_results(site: Site, client: openai.AsyncOpenAI) -> None:
    file = await upload(client, row("a"), expires_after={"anchor": "created_at", "seconds": 7200})
    assert file.expires_at == NOW + 7200
    expiry = {"anchor": "created_at", "seconds": 3600}
    batch = await create(client, file, completion_window="7d", output_expires_after=expiry)
    assert batch.expires_at == NOW + 7 * DAY_S
    batch = await site.ended(client, batch.id)
    assert batch.output_file_id
    assert (await client.files.retrieve(batch.output_file_id)).expires_at == NOW + 3600


async def test_the_oldest_batches_make_space_for_new_ones(site: Site, client: openai.AsyncOpenAI) -> None:
    site.limits = LIMITS.model_copy(update={"max_batches": 2})
    file = await upload(client, row("a"), row("bad"))
    first, second, third = [await site.ended(client, (await create(client, file)).id) for _ in range(3)]
    assert [batch.id async for batch in client.batches.list()] == [third.id, second.id]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve(first.id)
    kept = {id for batch in (second, third) for id in (batch.output_file_id, batch.error_file_id)}
    assert ids_on_disk(site.content) == kept | {file.id}
    assert {each.id async for each in client.files.list()} == ids_on_disk(site.content)


STATES = (
    *("validating", "in_progress", "finalizing", "cancelling"),
    *("completed", "failed", "expired", "cancelled"),
)
RESULTS: JSON = {"total": 3, "completed": 2, "failed": 1, "output_bytes": 20, "error_bytes": 10}


async def shown(folder: Path, warning: str = "", **fields: Any) -> JSON:
    """Return the JSON of a batch with results, of which some fields are different."""
    store = Store(folder)
    store.add_file(file_of("in"))
    store.add_batch(batch_of("b", "in", **(RESULTS | fields)), 1)
    warnings = {"b": warning} if warning else {}
    app = BatchAPI(
        store, on_disk(folder), lambda: None, limits=lambda key: LIMITS, warnings=lambda: warnings
    ).app()
    async with http_of(app) as http:
        answer = await http.get("/v1/batches/b", headers={"x-tenant": "anna"})
    store.close()
    found: JSON = answer.json()
    return found


@pytest.mark.parametrize("state", STATES)
async def test_a_batch_is_what_the_client_expects_in_each_state(tmp_path: Path, state: str) -> None:
    found = OpenAIBatch.model_validate(await shown(tmp_path, state=state), strict=True)
    assert (found.id, found.status, found.input_file_id) == ("b", state, "in")
    assert found.request_counts is not None
    assert found.request_counts.model_dump() == {"total": 3, "completed": 2, "failed": 1}
    ended = state in ENDED
    assert found.output_file_id == ("file-b-out" if ended else None)
    assert found.error_file_id == ("file-b-err" if ended else None)
    assert (found.errors, found.metadata) == (None, None)


@pytest.mark.parametrize("empty", ["output", "error"])
async def test_a_result_file_without_rows_is_not_named(tmp_path: Path, empty: str) -> None:
    fields: dict[str, Any] = {f"{empty}_bytes": 0}
    found = await shown(tmp_path, state="completed", **fields)
    assert [found[f"{name}_file_id"] is None for name in (empty, "output", "error")].count(True) == 2


async def test_errors_and_metadata_are_shown(tmp_path: Path) -> None:
    error = {"code": "invalid_json", "line": 2, "message": "not JSON", "param": None}
    found = await shown(tmp_path, metadata={"a": "1"}, errors=(error,))
    assert found["errors"] == {"object": "list", "data": [error]}
    assert found["metadata"] == {"a": "1"}


@pytest.mark.parametrize(
    ("state", "warning", "warnings"),
    [("in_progress", "late", ["late"]), ("in_progress", "", None), ("completed", "late", None)],
)
async def test_a_warning_is_shown_while_the_batch_is_open(
    tmp_path: Path, state: str, warning: str, warnings: list[str] | None
) -> None:
    assert (await shown(tmp_path, warning, state=state)).get("warnings") == warnings


async def test_tokens_are_added_up(tmp_path: Path) -> None:
    tokens: dict[str, Any] = {
        "input_tokens": 10,
        "cached_tokens": 4,
        "output_tokens": 7,
        "reasoning_tokens": 2,
    }
    assert (await shown(tmp_path, state="completed", **tokens))["usage"] == {
        "input_tokens": 10,
        "input_tokens_details": {"cached_tokens": 4},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 2},
        "total_tokens": 17,
    }
