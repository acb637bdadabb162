"""The routes, whatever they are for."""

import asyncio
import threading
from pathlib import Path

import httpx
import openai
import pytest
from starlette.applications import Starlette

from serve_app.jobs import failpoints
from serve_app.jobs.routes import BatchAPI
from serve_app.jobs.store import Store
from tests.progress import STILL_S
from tests.serve_app.jobs.conftest import Place
from tests.serve_app.jobs.helpers import CHAT, on_disk, row
from tests.serve_app.jobs.site import Site, upload


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
    def fail(point: str) -> None:
        if point == "content.sync":
            raise OSError("No space left on device")

    failpoints.hook = fail
    with pytest.raises(openai.InternalServerError, match="disk or database fails"):
        await upload(client, row("a"))
    failpoints.hook = None
    assert list((site.folder / "drafts").iterdir()) == []
    await upload(client, row("a"))


async def test_a_nul_in_a_request_is_no_failure_of_the_database(place: Place, tmp_path: Path) -> None:
    store = Store(place())
    app = Starlette(routes=BatchAPI(store, on_disk(tmp_path), lambda: None).routes())
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
    assert [answer.status_code for answer in answers] == [400] * len(answers)
    store.close()
