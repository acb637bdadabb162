"""The routes, called by OpenAI's client."""

from typing import Any

import httpx
import openai
import pytest
from pydantic_core import from_json

from serve_app.auth.key_store import Caller
from serve_app.auth.keys import Key, hash_key
from serve_app.auth.rate_limit import RateLimit
from serve_app.jobs.limits import DAY_S
from tests.serve_app.jobs.helpers import CHAT, NOW, row, text_of
from tests.serve_app.jobs.site import Site, create, upload


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
    caller = Caller(key, RateLimit(lambda: 0.0))

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
