"""The Batches deployment as Ray Serve makes, calls and ends it, in front of Engines that the test plays."""

import asyncio
import json
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json, to_json

from serve_app.api.protocol import JSON
from serve_app.api.scheduling import Scheduling
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.jobs import deployment
from serve_app.jobs.batches import BatchRunner
from serve_app.jobs.content import Draft
from serve_app.jobs.deployment import Batches
from serve_app.jobs.errors import StoreError
from serve_app.jobs.service import BatchService
from serve_app.settings.schema import SettingsError, parse
from serve_app.system.cpu_scheduling import BACKGROUND_NICE
from serve_app.wire.frame import unpack
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage, Tokens
from tests.progress import STILL_S
from tests.serve_app.answers import message
from tests.serve_app.ingress.engine_doubles import PLAIN, Engine, answer, health
from tests.serve_app.jobs.helpers import CHAT, commits, opened, row, text_of

__all__ = ["health"]

LIMIT_S = STILL_S
LIMIT = 10_000
ANNA = Scheduling(1, "anna")
USAGE = RequestUsage(Tokens(30, 0, 12))
ANSWER = answer(message(head=PLAIN, body=b'{"ok": 1}', usage=USAGE))
FORM = [(b"content-type", b"multipart/form-data; boundary=x")]
HEAD = (
    b'--x\r\ncontent-disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    b'--x\r\ncontent-disposition: form-data; name="file"; filename="in.jsonl"\r\n\r\n'
)


class Made(Batches):
    """A deployment that a test ends: Python's garbage collector awaits nothing."""

    end = Batches.__del__

    def __del__(self) -> None:  # type: ignore[override]
        pass


class Stuck:
    """An engine that doesn't answer."""

    async def __call__(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        await asyncio.Event().wait()
        yield b""


@pytest.fixture(autouse=True)
def scheduled(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The scheduling that the process asked for; this one has tests to run yet."""
    asked: list[int] = []
    monkeypatch.setattr(deployment, "use_batch_scheduling", asked.append)
    return asked


async def made(folder: Path, engine: Engine, quotas: bool = False, **sections: Any) -> Made:
    """Return a deployment, made as Ray Serve makes it."""
    settings = parse(
        {
            "models": [{"id": "demo", "source": "x"}],
            "batches": {"folder": str(folder)},
            "telemetry": {"metrics": False},
            **sections,
        }
    )
    batches: Any = Made.__new__(Made)
    async with asyncio.timeout(LIMIT_S):
        await batches.__init__(settings, {"demo": engine}, quotas)
    found: Made = batches
    return found


@asynccontextmanager
async def running(
    folder: Path, engine: Engine | None = None, quotas: bool = False, **sections: Any
) -> AsyncGenerator[Made, None]:
    batches = await made(folder, engine or Engine(ANSWER), quotas, **sections)
    try:
        yield batches
    finally:
        async with asyncio.timeout(LIMIT_S):
            await batches.end()


async def call(batches: Batches, method: str, path: str, body: JSON | None = None, **fields: Any) -> JSON:
    """Return the answer to an HTTP request that must succeed."""
    text = b"" if body is None else to_json(body)
    request = RelayRequest(method, path, b"", fields.pop("headers", []), text, ANNA, **fields)
    async with asyncio.timeout(LIMIT_S):
        pieces = [unpack(message) async for message in batches.relay(request)]
    answered = b"".join(piece.body for piece in pieces)
    assert pieces[0].head is not None
    assert pieces[0].head.status == 200, answered
    found: JSON = from_json(answered)
    return found


async def upload(batches: Batches, *rows: JSON) -> str:
    """Upload a file in two pieces, and return its id."""
    asked = asyncio.ensure_future(call(batches, "POST", "/v1/files", headers=FORM, upload="up"))
    async with asyncio.timeout(LIMIT_S):
        assert await batches.put("up", HEAD, False)
        assert await batches.put("up", text_of(*rows) + b"\r\n--x--\r\n", True)
    return str((await asked)["id"])


async def begun(batches: Batches, *rows: JSON) -> str:
    """Begin a batch of rows, and return its id."""
    fields = {"input_file_id": await upload(batches, *rows), "endpoint": CHAT, "completion_window": "24h"}
    return str((await call(batches, "POST", "/v1/batches", fields))["id"])


async def ended(batches: Batches, id: str) -> JSON:
    """Return a batch once it has ended."""
    with commits() as committed:
        async with asyncio.timeout(LIMIT_S):
            while True:
                committed.clear()
                batch = await call(batches, "GET", f"/v1/batches/{id}")
                if batch["status"] in ("completed", "failed"):
                    return batch
                await committed.wait()


def usage_of(folder: Path, tenants: JSON) -> JSON:
    """Return the section `usage` of a config with quotas."""
    return {"quotas": {"folder": str(folder), "tenants": tenants}}


def short(custom_id: str) -> JSON:
    """Return a row whose answer has a limit, as a quota needs it."""
    return row(custom_id, body=row(custom_id)["body"] | {"max_tokens": 100})


async def test_a_batch_goes_to_the_engine_for_its_tenant(tmp_path: Path, scheduled: list[int]) -> None:
    engine = Engine(ANSWER)
    async with running(tmp_path, engine) as batches:
        batch = await ended(batches, await begun(batches, short("a"), short("b")))
        assert batch["request_counts"] == {"total": 2, "completed": 2, "failed": 0}
        assert [(request.source, request.scheduling.tenant) for request in engine.requests] == [
            ("batch", "anna")
        ] * 2
        assert (await batches.stats())["rows"]["completed"] == 2
        await batches.check_health()
    # Live requests go first.
    assert scheduled == [BACKGROUND_NICE]


@pytest.mark.parametrize("content", [None, "content"])
async def test_a_folder_that_cannot_be_used_is_named_with_its_field(
    content: str | None, tmp_path: Path
) -> None:
    (tmp_path / "file").write_text("")
    folder = tmp_path / ("file" if content is None else "fine")
    section = {"folder": str(folder)} | ({"content": str(tmp_path / "file")} if content else {})
    with pytest.raises(StoreError) as raised:
        await made(folder, Engine(ANSWER), batches=section)
    message = str(raised.value)
    assert message.startswith(f"batches.folder ({folder})")
    assert (f"batches.content ({tmp_path / 'file'})" in message) is (content is not None)
    assert "File exists" in message or "Not a directory" in message
    assert message.endswith("it must be a place where the service can make folders and write files")


async def test_a_file_that_is_no_database_is_named_with_its_field(tmp_path: Path) -> None:
    (tmp_path / "batches.db").write_text("no database, by far" * 100)
    with pytest.raises(StoreError) as raised:
        await made(tmp_path, Engine(ANSWER))
    assert str(raised.value) == f"batches.folder: {tmp_path}/batches.db: file is not a database"


async def test_a_start_that_failed_can_be_ended_and_leaves_the_folder_to_the_next(tmp_path: Path) -> None:
    (tmp_path / "files").write_text("")
    batches: Any = Made.__new__(Made)
    settings = parse({"models": [{"id": "demo", "source": "x"}], "batches": {"folder": str(tmp_path)}})
    with pytest.raises(StoreError):
        await batches.__init__(settings, {"demo": Engine(ANSWER)})
    await batches.end()
    (tmp_path / "files").unlink()
    async with running(tmp_path) as after:
        assert (await call(after, "GET", "/v1/batches"))["data"] == []


async def test_the_quota_of_a_key_needs_the_quotas_deployment(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    entry = {"name": "ada", "sha256": hash_key(b"x"), "tenant": "anna", "quota": {"tokens_per_day": 9}}
    path.write_text(json.dumps([entry]))
    access = {"keys_file": str(path)}
    with pytest.raises(SettingsError, match=r"the quota of the key 'ada' needs args\.usage\.quotas"):
        await made(tmp_path / "b", Engine(ANSWER), access=access)
    usage = usage_of(tmp_path / "quotas", {})
    async with running(tmp_path / "b", quotas=True, access=access, usage=usage) as batches:
        await batches.check_health()


async def test_rows_in_flight_at_the_end_are_left_to_the_next_replica(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deployment, "DRAIN_S", 0.0)
    stuck = Engine(Stuck())
    async with running(tmp_path, stuck) as batches:
        id = await begun(batches, row("a"))
        async with asyncio.timeout(LIMIT_S):
            await stuck.asked.wait()
    assert stuck.answers[0].stopped.is_set()
    async with running(tmp_path) as after:
        assert (await ended(after, id))["status"] == "completed"


async def test_an_end_leaves_nothing_running(tmp_path: Path) -> None:
    usage = {"ledger": {"folder": str(tmp_path / "ledger")}}
    before = asyncio.all_tasks()
    async with running(tmp_path, usage=usage, telemetry={"metrics": True}) as batches:
        await ended(batches, await begun(batches, short("a")))
    left = asyncio.all_tasks() - before
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*left, return_exceptions=True)


async def test_an_end_that_is_cancelled_closes_the_folder_all_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closing, go, closed = asyncio.Event(), asyncio.Event(), asyncio.Event()
    close = BatchService.close

    async def slow(self: BatchService, timeout_s: float) -> None:
        closing.set()
        await go.wait()
        await close(self, timeout_s)
        closed.set()

    monkeypatch.setattr(BatchService, "close", slow)
    batches = await made(tmp_path, Engine(ANSWER))
    async with asyncio.timeout(LIMIT_S):
        end = asyncio.ensure_future(batches.end())
        await closing.wait()
        end.cancel()
        with pytest.raises(asyncio.CancelledError):
            await end
        go.set()
        await closed.wait()
    store, _ = opened(tmp_path)
    store.close()


async def test_a_client_that_leaves_takes_its_upload_with_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    discarded, discard = asyncio.Event(), Draft.discard

    def noted(self: Draft) -> None:
        discard(self)
        discarded.set()

    monkeypatch.setattr(Draft, "discard", noted)
    async with running(tmp_path) as batches, asyncio.timeout(LIMIT_S):
        messages = batches.relay(RelayRequest("POST", "/v1/files", b"", FORM, b"", ANNA, upload="up"))
        asked = asyncio.ensure_future(anext(messages))
        assert await batches.put("up", HEAD, False)
        # Two pieces may wait: when a third one has room, the first one is on the disk.
        for _ in range(3):
            assert await batches.put("up", b"more", False)
        drafts = tmp_path / "drafts"
        assert len(list(drafts.iterdir())) == 1
        asked.cancel()
        await discarded.wait()
        assert list(drafts.iterdir()) == []


async def test_a_replica_that_runs_no_batches_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def fail(self: BatchRunner) -> None:
        raise RuntimeError("broken")

    monkeypatch.setattr(BatchRunner, "run", fail)
    async with running(tmp_path) as batches:
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="broken"):
            await batches.check_health()


async def test_a_replica_that_follows_the_keys_no_more_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KeyStore) -> None:
        raise RuntimeError("not followed")

    keys = tmp_path / "keys.json"
    keys.write_text("[]")
    async with running(tmp_path, access={"keys_file": str(keys)}) as batches:
        await batches.check_health()
        monkeypatch.setattr(KeyStore, "check", fail)
        with pytest.raises(RuntimeError, match="not followed"):
            await batches.check_health()
