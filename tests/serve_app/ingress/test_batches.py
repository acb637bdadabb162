"""Files and batches through the Ingress, called by OpenAI's client; the deployment runs in the test."""

import asyncio
from collections.abc import AsyncIterator, Collection
from pathlib import Path
from typing import Any, Literal

import httpx
import openai
import pytest
import yaml
from openai.types import Batch
from starlette.requests import Request
from starlette.types import Message, Receive, Scope, Send

from serve_app.api.errors import RequestError
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.ingress.batches import Forward
from serve_app.ingress.body import BodyBudget
from serve_app.ingress.context import RequestMiddleware
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import ModelState
from serve_app.jobs.service import BatchService
from serve_app.jobs.store import Store
from serve_app.settings.schema import Settings, parse
from serve_app.telemetry.request_tracker import RequestTracker
from tests.progress import STILL_S
from tests.serve_app.ingress.engine_doubles import Client, check_error, health
from tests.serve_app.jobs.engine import Engine
from tests.serve_app.jobs.handle import Handle
from tests.serve_app.jobs.helpers import commits, row, text_of

__all__ = ["health"]

PIECE_BYTES = 1 << 20
"""Bytes of a piece of an upload."""

LIMIT_S = STILL_S
CHAT: Literal["/v1/chat/completions"] = "/v1/chat/completions"
ENDED = {"completed", "failed", "expired", "cancelled"}
KEYS = {
    "anna": ("default", "flex"),
    "ben": ("default", "flex"),
    "live": ("default",),
    "some": ("default", "flex"),
    "small": ("flex",),
}
"""Tiers of each key, which is the name of its tenant too."""


def settings_of(folder: Path) -> Settings:
    """Return the settings of a service with these keys, of which `some` may use one of the two models."""
    path = folder / "keys.yaml"
    entries = [
        {"name": name, "tenant": name, "tiers": list(tiers), "sha256": hash_key(name.encode())}
        | ({"models": ["demo"]} if name == "some" else {})
        | ({"batches": {"max_file_bytes": 1_000, "max_lines": 2}} if name == "small" else {})
        for name, tiers in KEYS.items()
    ]
    path.write_text(yaml.safe_dump(entries))
    return parse(
        {
            "models": [{"id": "demo", "source": "x"}, {"id": "large", "source": "y"}],
            "batches": {"folder": str(folder / "b")},
            "access": {"keys_file": str(path)},
        }
    )


class Site:
    """An Ingress in front of a Batches deployment."""

    def __init__(self, settings: Settings, service: BatchService) -> None:
        self.handle = Handle(service)
        handle: Any = self.handle
        self.app = Ingress(settings, {}, handle).__serve_build_asgi_app__()

    def http(self, key: str = "anna") -> httpx.AsyncClient:
        """Return an HTTP client."""
        headers = {"authorization": f"Bearer {key}"}
        transport = httpx.ASGITransport(self.app)
        return httpx.AsyncClient(transport=transport, base_url="http://ingress", headers=headers)

    def client(self, key: str) -> openai.AsyncOpenAI:
        """Return OpenAI's client."""
        # Its type hints name another package; it takes clients of both.
        http: Any = self.http(key)
        return openai.AsyncOpenAI(base_url="http://ingress/v1", api_key=key, http_client=http, max_retries=0)


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    settings = settings_of(tmp_path)
    assert settings.batches
    assert settings.access
    service = await BatchService.open(
        settings.batches, Engine(), {"demo", "large"}, KeyStore(settings.access)
    )
    yield Site(settings, service)
    await service.close(5.0)


async def ended(client: openai.AsyncOpenAI, id: str) -> Batch:
    with commits() as committed:
        async with asyncio.timeout(LIMIT_S):
            while True:
                committed.clear()
                batch = await client.batches.retrieve(id)
                if batch.status in ENDED:
                    return batch
                await committed.wait()


async def test_a_batch_goes_its_way(site: Site) -> None:
    client = site.client("anna")
    text = text_of(*(row(str(number), note="x" * 10_000) for number in range(300)))
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    assert file.bytes == len(text) > 2 * PIECE_BYTES
    assert sum(site.handle.pieces) > len(text)
    assert max(site.handle.pieces) == PIECE_BYTES
    assert site.handle.asked[0].body == b""
    assert not any(name == b"authorization" for name, _ in site.handle.asked[0].headers)
    assert (await client.files.content(file.id)).content == text
    batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    batch = await ended(client, batch.id)
    assert batch.request_counts
    assert batch.request_counts.completed == 300
    assert batch.output_file_id
    output = (await client.files.content(batch.output_file_id)).text
    assert output.count("\n") == 300
    assert [one.id for one in (await client.batches.list()).data] == [batch.id]
    deleted = await client.files.delete(file.id)
    assert deleted.deleted


async def test_a_tenant_sees_its_own_only(site: Site) -> None:
    anna, ben = site.client("anna"), site.client("ben")
    file = await anna.files.create(file=("in.jsonl", text_of(row("a"))), purpose="batch")
    batch = await anna.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    with pytest.raises(openai.NotFoundError):
        await ben.files.retrieve(file.id)
    with pytest.raises(openai.NotFoundError):
        await ben.batches.retrieve(batch.id)
    assert (await ben.files.list()).data == []
    async with site.http("ben") as http:
        answer = await http.get("/v1/files", headers={"x-tenant": "anna"})
        check_error(answer, 403, "permission_error", "tenant")
        answer = await http.get("/v1/files", headers={"authorization": "Bearer none"})
        check_error(answer, 401, "authentication_error")


async def test_a_key_without_flex_creates_no_batch(site: Site) -> None:
    async with site.http("live") as http:
        assert (await http.get("/v1/batches")).status_code == 200
        message = check_error(
            await http.post("/v1/batches", json={}), 403, "permission_error", "service_tier"
        )
        assert "'flex'" in message


@pytest.mark.parametrize(("model", "status"), [("demo", "completed"), ("large", "failed")])
async def test_a_key_for_some_models_creates_batches_for_these(site: Site, model: str, status: str) -> None:
    client = site.client("some")
    text = text_of(row("1", body={"model": model, "messages": [{"role": "user", "content": "hi"}]}))
    file = await client.files.create(file=("in.jsonl", text), purpose="batch")
    batch = await client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    batch = await ended(client, batch.id)
    assert batch.status == status
    if batch.errors and batch.errors.data:
        (error,) = batch.errors.data
        assert (error.code, error.message) == (
            "model_not_found",
            "The model 'large' is not served here; served are: demo",
        )


class Held(Engine):
    """Holds a validation until `valid` is set.

    Attributes:
        validating: Set once a validation has begun.
        valid: Lets it go on.
    """

    def __init__(self) -> None:
        super().__init__()
        self.validating = asyncio.Event()
        self.valid = asyncio.Event()

    async def refresh(self, wake: bool = False) -> Collection[str]:
        self.validating.set()
        await self.valid.wait()
        return ()


async def test_a_key_that_is_removed_widens_no_rights_of_its_batches(tmp_path: Path) -> None:
    settings = settings_of(tmp_path)
    assert settings.batches
    assert settings.access
    keys, engine = KeyStore(settings.access), Held()
    service = await BatchService.open(settings.batches, engine, {"demo", "large"}, keys)
    try:
        client = Site(settings, service).client("some")
        text = text_of(row("1", body={"model": "large", "messages": [{"role": "user", "content": "hi"}]}))
        file = await client.files.create(file=("in.jsonl", text), purpose="batch")
        batch = await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
        async with asyncio.timeout(LIMIT_S):
            await engine.validating.wait()
        path = tmp_path / "keys.yaml"
        others = [entry for entry in yaml.safe_load(path.read_text()) if entry["name"] != "some"]
        path.write_text(yaml.safe_dump(others))
        keys.refresh()
        engine.valid.set()
        # The Ingress has not read the file yet.
        batch = await ended(client, batch.id)
        assert (batch.status, engine.sent) == ("failed", [])
        assert batch.errors
        assert batch.errors.data
        assert [error.code for error in batch.errors.data] == ["model_not_found"]
        with pytest.raises(openai.InternalServerError, match="'some' is not known to the batches yet"):
            await client.batches.create(input_file_id=file.id, endpoint=CHAT, completion_window="24h")
    finally:
        engine.valid.set()
        await service.close(5.0)


async def test_a_key_s_own_limits_hold_for_its_files_and_batches(site: Site) -> None:
    small, anna = site.client("small"), site.client("anna")
    rows = text_of(*(row(str(number)) for number in range(3)))
    for client, status in ((small, "failed"), (anna, "completed")):
        file = await client.files.create(file=("in.jsonl", rows), purpose="batch")
        batch = await client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
        )
        assert (await ended(client, batch.id)).status == status
    with pytest.raises(openai.APIStatusError) as raised:
        await small.files.create(file=("in.jsonl", b"x" * 1_001), purpose="batch")
    assert raised.value.status_code == 413


async def test_an_ingress_that_follows_the_keys_no_more_is_unhealthy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: KeyStore) -> None:
        raise RuntimeError("not followed")

    ingress = Ingress(settings_of(tmp_path), {})
    await ingress.check_health()
    monkeypatch.setattr(KeyStore, "check", fail)
    with pytest.raises(RuntimeError, match="not followed"):
        await ingress.check_health()
    await Ingress(parse({"models": [{"id": "demo", "source": "x"}]}), {}).check_health()


@pytest.mark.parametrize("path", ["/v1/files", "/v1/files/file-1/content", "/v1/batches", "/v1/batches/x"])
async def test_a_service_without_batches_says_so(path: str) -> None:
    async with Client() as client:
        message = check_error(await client.get(path), 404, "not_found_error")
    assert "args.batches" in message


async def test_an_upload_without_end_is_refused_before_all_of_it_has_come(site: Site) -> None:
    sent = 0

    async def pieces() -> AsyncIterator[bytes]:
        nonlocal sent
        yield b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
        for _ in range(1000):
            await asyncio.sleep(0)
            sent += 1
            yield b"x" * PIECE_BYTES

    async with site.http() as http, asyncio.timeout(STILL_S):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await http.post("/v1/files", content=pieces(), headers=kind)
    check_error(answer, 413, "request_too_large")
    assert sent < 300


async def test_a_large_body_elsewhere_is_refused(site: Site) -> None:
    async with site.http() as http:
        answer = await http.post("/v1/batches", content=b"x" * ((1 << 17) + 1))
        check_error(answer, 413, "request_too_large")


async def test_a_body_that_is_encoded_is_refused(site: Site) -> None:
    async with site.http() as http:
        answer = await http.post("/v1/files", content=b"x", headers={"content-encoding": "gzip"})
        check_error(answer, 415, "invalid_request_error", "content-encoding")


@pytest.mark.parametrize(
    ("range_", "status", "content_range"), [("bytes=x", 400, None), ("bytes=100-200", 416, "bytes */2")]
)
async def test_a_wrong_range_of_a_file_is_refused_in_the_shape_of_all_errors(
    site: Site, range_: str, status: int, content_range: str | None
) -> None:
    file = await site.client("anna").files.create(file=("in.jsonl", b"{}"), purpose="batch")
    async with site.http() as http:
        path = f"/v1/files/{file.id}/content"
        answer = await http.get(path, headers={"range": range_})
        assert check_error(answer, status, "invalid_request_error", "range").startswith("range: ")
        assert answer.headers.get("content-range") == content_range
        part = await http.get(path, headers={"range": "bytes=1-1"})
        assert (part.status_code, part.content) == (206, b"}")


@pytest.mark.parametrize(("method", "path"), [("DELETE", "/v1/files"), ("PUT", "/v1/batches")])
async def test_a_method_that_is_not_there_is_refused_in_the_shape_of_all_errors(
    site: Site, method: str, path: str
) -> None:
    async with site.http() as http:
        answer = await http.request(method, path)
    check_error(answer, 405, "invalid_request_error")
    assert answer.headers["allow"]


async def test_a_fault_of_the_batches_is_a_500_with_its_stack_in_the_log(
    site: Site, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def files(*_: object, **__: object) -> None:
        raise KeyError("inside")

    monkeypatch.setattr(Store, "files", files)
    async with site.http() as http:
        answer = await http.get("/v1/files")
        assert "inside" not in check_error(answer, 500, "internal_error")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_fault_of_an_upload_is_a_500_with_its_stack_in_the_log(
    site: Site, caplog: pytest.LogCaptureFixture
) -> None:
    site.handle.failure = KeyError("inside")
    async with site.http() as http, asyncio.timeout(LIMIT_S):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        answer = await http.post("/v1/files", content=b"x", headers=kind)
        assert "inside" not in check_error(answer, 500, "internal_error")
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_replica_that_is_gone_is_told(site: Site) -> None:
    service, site.handle.service = site.handle.service, None
    async with site.http() as http, asyncio.timeout(LIMIT_S):
        kind = {"content-type": "multipart/form-data; boundary=b"}
        check_error(await http.post("/v1/files", content=b"x", headers=kind), 503, "service_unavailable")
        check_error(await http.get("/v1/files"), 503, "service_unavailable")
    site.handle.service = service


async def test_the_statistics_have_the_batches(site: Site, health: dict[str, ModelState]) -> None:
    async with site.http() as http:
        assert "no replica" in (await http.get("/stats")).json()["batches"]["error"]
    async with Client() as client:
        assert "batches" not in (await client.get("/stats")).json()


async def test_the_statistics_are_those_of_the_replica(site: Site) -> None:
    handle: Any = site.handle

    async def running() -> int:
        return 1

    stats = await Forward(handle, running).stats()
    assert stats["rows"] == {"waiting": 0, "in_flight": 0, "completed": 0, "failed": 0}
    service, site.handle.service = site.handle.service, None
    assert (await Forward(handle, running).stats())["error"] == "the replica is gone"
    site.handle.service = service


async def test_a_body_for_the_batches_counts_with_those_of_all_requests(site: Site) -> None:
    handle: Any = site.handle

    async def running() -> int:
        return 1

    budget = BodyBudget(100)
    held: list[int] = []

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        await Forward(handle, running).answer(Request(scope, receive), "/v1/batches", [])
        held.append(budget.held)

    async def send(size: int) -> None:
        async def receive() -> Message:
            return {"type": "http.request", "body": b"x" * size, "more_body": False}

        scope = {"type": "http", "method": "POST", "path": "/v1/batches", "query_string": b"", "headers": []}
        await RequestMiddleware(app, RequestTracker([]), budget)(scope, receive, unused)

    await send(100)
    assert held == [100]
    assert budget.held == 0
    with pytest.raises(RequestError) as caught:
        await send(101)
    assert caught.value.status == 503


async def unused(message: Message) -> None:
    raise AssertionError


SMALL = 1 << 16
FORM = {"content-type": "multipart/form-data; boundary=b"}


async def upload(site: Site, budget: BodyBudget) -> tuple[int, int]:
    """Upload a file of one and a half pieces; return the status, and the most bytes that were held."""
    handle: Any = site.handle

    async def running() -> int:
        return 1

    content = text_of(row("1", note="x" * (PIECE_BYTES * 3 // 2)))
    body = b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
    body += b'--b\r\nContent-Disposition: form-data; name="file"; filename="x"\r\n\r\n'
    body += content + b"\r\n--b--\r\n"
    left = [body[start : start + SMALL] for start in range(0, len(body), SMALL)]
    most = status = 0

    async def receive() -> Message:
        nonlocal most
        most = max(most, budget.held)
        return {"type": "http.request", "body": left.pop(0), "more_body": bool(left)}

    async def send(message: Message) -> None:
        nonlocal status
        status = message.get("status", status)

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        response = await Forward(handle, running).answer(
            Request(scope, receive), "/v1/files", scope["headers"]
        )
        await response(scope, receive, send)

    headers = [(name.encode(), value.encode()) for name, value in FORM.items()]
    scope = {"type": "http", "method": "POST", "path": "/v1/files", "query_string": b"", "headers": headers}
    async with asyncio.timeout(LIMIT_S):
        await RequestMiddleware(app, RequestTracker([]), budget)(scope, receive, send)
    assert budget.held == 0
    return status, most


async def test_an_upload_counts_with_the_bodies_of_all_requests(site: Site) -> None:
    status, most = await upload(site, BodyBudget(10 * PIECE_BYTES))
    assert status == 200
    assert PIECE_BYTES - SMALL <= most <= PIECE_BYTES + SMALL


async def test_an_upload_without_room_goes_on_in_small_pieces(site: Site) -> None:
    status, most = await upload(site, BodyBudget(SMALL - 1))
    assert (status, most) == (200, 0)
    assert max(site.handle.pieces) == SMALL
