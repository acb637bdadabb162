"""The routes of batches, called by OpenAI's client."""

from dataclasses import replace

import openai
import pytest
from pydantic_core import from_json

from serve_app.api.protocol import JSON
from serve_app.jobs.limits import DAY_S
from tests.serve_app.jobs.helpers import NOW, ids_on_disk, row
from tests.serve_app.jobs.site import LIMITS, Site, create, upload


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


async def test_open_batches_are_limited(site: Site, client: openai.AsyncOpenAI) -> None:
    site.engine.go.clear()
    file = await upload(client, row("a"))
    for _ in range(3):
        await create(client, file)
    with pytest.raises(openai.BadRequestError, match="3 batches of this tenant are open"):
        await create(client, file)


async def test_the_oldest_batches_make_space_for_new_ones(site: Site, client: openai.AsyncOpenAI) -> None:
    site.limits = replace(LIMITS, max_batches=2)
    file = await upload(client, row("a"), row("bad"))
    first, second, third = [await site.ended(client, (await create(client, file)).id) for _ in range(3)]
    assert [batch.id async for batch in client.batches.list()] == [third.id, second.id]
    with pytest.raises(openai.NotFoundError):
        await client.batches.retrieve(first.id)
    kept = {id for batch in (second, third) for id in (batch.output_file_id, batch.error_file_id)}
    assert ids_on_disk(site.content) == kept | {file.id}
    assert {each.id async for each in client.files.list()} == ids_on_disk(site.content)


async def test_results_can_be_read_while_they_are_written(site: Site, client: openai.AsyncOpenAI) -> None:
    batch = await create(client, await upload(client, *map(row, ("a", "bad", "b"))))
    path = f"/v1/batches/{batch.id}"
    async with site.http() as http:
        http.headers["authorization"] = "Bearer anna"
        # It ends with the batch.
        output = await http.get(f"{path}/output")
        errors = await http.get(f"{path}/errors")
        assert (await site.ended(client, batch.id)).status == "completed"
        assert {from_json(line)["custom_id"] for line in output.content.splitlines()} == {"a", "b"}
        assert [from_json(line)["custom_id"] for line in errors.content.splitlines()] == ["bad"]
        size = len(output.content)
        again = await http.get(f"{path}/output", params={"offset": size - 5})
        assert again.content == output.content[-5:]
        for offset in (str(size + 1), "-1", "x"):
            wrong = await http.get(f"{path}/output", params={"offset": offset})
            assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "offset")
        other = await http.get(f"{path}/output", headers={"authorization": "Bearer ben"})
        assert other.status_code == 404
        await client.files.delete(site.store.batch(batch.id).output_file)
        assert (await http.get(f"{path}/output")).status_code == 404
