"""Rows on their way to Engines that the test plays."""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Sequence
from pathlib import Path
from typing import Any

import pytest
from pydantic_core import from_json, to_json
from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError

from serve_app.api.errors import EngineLostError, RequestError, engine_failed
from serve_app.api.protocol import JSON
from serve_app.api.scheduling import TIER_PRIORITY, Scheduling
from serve_app.auth.key_store import KeyStore
from serve_app.auth.keys import hash_key
from serve_app.client import RETRYABLE
from serve_app.engine.accounts import BY_QUOTA
from serve_app.ingress import engine_call
from serve_app.ingress.body import LARGE_BYTES
from serve_app.ingress.engine_call import PoisonError
from serve_app.ingress.models import MAX_AGE_S
from serve_app.ingress.status import Health, ModelState
from serve_app.rows import engines
from serve_app.rows.engines import EngineClient
from serve_app.rows.pacing import EngineLoad
from serve_app.rows.rows import QuotaError, RowAnswer, RowRequest
from serve_app.settings.schema import parse
from serve_app.settings.usage import Quota
from serve_app.wire.frame import Head
from serve_app.wire.request import RelayRequest
from tests.fakes.clock import Clock
from tests.progress import STILL_S
from tests.serve_app.answers import END, complete, message, refused
from tests.serve_app.ingress.engine_doubles import CHAT, PLAIN, Engine, answer, health
from tests.serve_app.inspected import inspect

__all__ = ["health"]

LIMIT_S = STILL_S
BODY: JSON = {"model": "demo", "messages": [{"role": "user", "content": "hi"}], "service_tier": "flex"}


ANNA = Scheduling(TIER_PRIORITY["flex"], "anna", weight=3.0, key="ada")


def row(endpoint: str = CHAT, body: JSON = BODY, models: Sequence[str] | None = None) -> RowRequest:
    return RowRequest(endpoint, to_json(body), ANNA, models)


def client_of(engines: dict[str, Engine], **ingress: Any) -> EngineClient:
    models = [
        {"id": name, "kind": "function", "target": "a:B", "embeddings": True}
        if name == "embed"
        else {"id": name, "source": "x"}
        for name in engines
    ]
    handles: Any = engines
    return EngineClient(parse({"models": models, "ingress": ingress}), handles, Health("llm", list(engines)))


async def test_a_row_goes_to_its_model_with_its_tier_tenant_and_weight() -> None:
    engines = {"other": Engine(answer()), "demo": Engine(answer(complete(PLAIN, b'{"ok": 1}')))}
    client = client_of(engines, max_tokens=9)
    assert await client.send(row()) == RowAnswer(200, {"ok": 1})
    (request,) = engines["demo"].requests
    assert (request.method, request.path, from_json(request.body)) == ("POST", CHAT, BODY)
    assert request.scheduling == ANNA
    assert request.max_tokens == 9
    assert (request.source, request.key) == ("batch", "ada")
    assert request.facts.tokens > 0
    assert engines["demo"].answers[0].stopped.is_set()


async def test_a_row_has_its_key_s_quota_and_its_batch_s_models(
    tmp_path: Path, health: dict[str, ModelState]
) -> None:
    path = tmp_path / "keys.json"
    entry = {"name": "ada", "sha256": hash_key(b"x"), "tenant": "anna", "quota": {"tokens_per_day": 2_000}}
    path.write_text(json.dumps([entry]))
    models = [{"id": name, "source": "x"} for name in ("demo", "large")]
    settings = parse({"models": models, "access": {"keys_file": str(path)}})
    assert settings.access
    engine = Engine(answer(complete(PLAIN, b"{}")))
    handles: Any = {"demo": engine, "large": engine}
    client = EngineClient(settings, handles, Health("llm", list(handles)), KeyStore(settings.access))
    with pytest.raises(RequestError, match="it has access to: demo"):
        await client.send(row(CHAT, BODY | {"model": "large"}, models=["demo"]))
    assert (await client.send(row())).status == 200
    prompt = BODY | {"messages": [{"role": "user", "content": "hi" * 2_000}]}
    assert (await client.send(row(CHAT, prompt))).status == 200
    request, long = engine.requests
    assert request.quota == Quota(tokens_per_day=2_000)
    # Its replica is chosen as for a live request of the tenant, which has a part of the caches of its own.
    stated = inspect(to_json(prompt), CHAT, settings.ingress)
    assert stated.prefix
    assert long.facts.prefix == stated.cached_for("", "anna").prefix


async def test_a_refusal_by_a_quota_tells_nothing_of_the_engines() -> None:
    error = RequestError(429, "rate_limit_error", "key ada: tokens_per_day 2000: none", retry_after_s=7.0)
    engine = Engine(answer(refused(error, headers=[BY_QUOTA])))
    with pytest.raises(QuotaError, match="key ada: tokens_per_day 2000") as raised:
        await client_of({"demo": engine}).send(row())
    assert (raised.value.status, raised.value.retry_after_s) == (429, 7.0)
    full = Engine(answer(refused(error)))
    assert (await client_of({"demo": full}).send(row())).status == 429


@pytest.mark.parametrize("dies", [True, False])
async def test_a_row_lost_with_the_process_of_its_engine_is_counted(dies: bool) -> None:
    # An engine that dies alone leaves a replica that writes the row.
    errors: list[Exception] = [RayActorError() if dies else EngineLostError()]

    async def answering(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        if errors:
            raise errors.pop()
        yield complete(PLAIN, b"{}")

    handles: Any = {"demo": Engine(answering)}
    settings = parse({"models": [{"id": "demo", "source": "x"}]})
    client = EngineClient(settings, handles, Health("llm", ["demo"]))
    assert (await client.send(row())).status == 200
    assert client.lost_calls["demo"] == dies


async def test_a_row_calls_a_route_by_its_name_in_vllm() -> None:
    engine = Engine(answer(complete(PLAIN, b'{"ok": 1}')))
    await client_of({"demo": engine}).send(row("/v1/classify", {"model": "demo", "input": "a"}))
    assert [request.path for request in engine.requests] == ["/classify"]


async def test_an_answer_in_pieces_is_joined() -> None:
    engine = Engine(answer(message(head=PLAIN, body=b'{"a": "'), message(body=b'b"}'), END))
    assert await client_of({"demo": engine}).send(row()) == RowAnswer(200, {"a": "b"})


async def test_a_large_answer_is_read_beside_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = set()

    def parsed(text: bytes) -> JSON:
        threads.add(threading.get_ident())
        found: JSON = from_json(text)
        return found

    monkeypatch.setattr(engines, "from_json", parsed)
    text = b'{"a": "%s"}' % (b"x" * LARGE_BYTES)
    engine = Engine(answer(complete(PLAIN, text)))
    assert (await client_of({"demo": engine}).send(row())).body == from_json(text)
    assert threads
    assert threading.get_ident() not in threads


async def test_a_refusal_says_when_to_come_back() -> None:
    full = RequestError(429, "rate_limit_error", "full", retry_after_s=7.0)
    wrong = RequestError(500, "internal_error", "never", final=True)
    engine = Engine(answer(refused(full)))
    found = await client_of({"demo": engine}).send(row())
    assert (found.status, found.retry_after_s, found.final) == (429, 7.0, False)
    engine = Engine(answer(refused(wrong)))
    found = await client_of({"demo": engine}).send(row())
    assert (found.status, found.final) == (500, True)


@pytest.mark.parametrize(
    ("status", "text", "shown"),
    [
        (500, b"Internal Server Error", 500),
        # Text that is no JSON object answers no row.
        (200, b'{"choices": [{"text": "\\ud800"}]}', 502),
        (200, b"[]", 502),
        (200, b"", 502),
    ],
)
async def test_an_answer_without_a_json_object_is_an_error_with_its_text(
    status: int, text: bytes, shown: int
) -> None:
    engine = Engine(answer(complete(Head(status, []), text)))
    found = await client_of({"demo": engine}).send(row())
    assert (found.status, found.body["error"]["message"]) == (shown, text.decode())
    assert found.body["error"]["code"] == shown


async def test_an_answer_that_breaks_off_is_tried_again() -> None:
    engine = Engine(answer(message(head=PLAIN, body=b'{"ok": 1}')))
    with pytest.raises(RequestError) as raised:
        await client_of({"demo": engine}).send(row())
    assert raised.value.status == 503


@pytest.mark.parametrize(
    ("endpoint", "body", "status"),
    [
        (CHAT, BODY | {"model": "none"}, 404),
        (CHAT, BODY | {"n": 1000}, 400),
        (CHAT, BODY | {"max_tokens": 10}, 400),
        (CHAT, BODY | {"model": "embed"}, 400),
        (CHAT, BODY | {"vllm_xargs": {"a": [1] * 20_000}}, 400),
        ("/generate", {"model": "demo", "prompts": []}, 400),
    ],
)
async def test_a_row_is_held_to_the_limits_of_requests(endpoint: str, body: JSON, status: int) -> None:
    client = client_of({"demo": Engine(answer()), "embed": Engine(answer())}, max_tokens=9)
    with pytest.raises(RequestError) as raised:
        await client.send(row(endpoint, body))
    assert raised.value.status == status


async def test_generate_needs_no_model_where_one_is_served() -> None:
    engine = Engine(answer(complete(PLAIN, b"{}")))
    found = await client_of({"demo": engine}).send(row("/generate", {"prompts": ["x"]}))
    assert found.status == 200


class Dying:
    """Engines of which the first ones die of every row.

    Args:
        deaths: Engines that die.
        refusals: Rows that each of them refuses before its process ends.
    """

    def __init__(self, deaths: int, refusals: int = 0) -> None:
        self.left = deaths
        self.refusals = refusals
        self.refuses = 0
        self.running = self.most = 0

    async def __call__(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        if self.refuses:
            self.refuses -= 1
            yield refused(engine_failed())
            return
        if self.left > 0:
            self.left -= 1
            self.refuses = self.refusals
            raise EngineLostError
        self.running += 1
        self.most = max(self.most, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        yield complete(PLAIN, b"{}")


@pytest.mark.parametrize("refusals", [0, 3])
async def test_a_row_survives_two_engines_and_no_third(
    refusals: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_call, "BACKOFF_S", 0.0)
    engine = Engine(Dying(2, refusals))
    assert (await client_of({"demo": engine}).send(row())).status == 200
    assert len(engine.requests) == 3 + 2 * refusals
    engine = Engine(Dying(3, refusals))
    with pytest.raises(PoisonError):
        await client_of({"demo": engine}).send(row())
    assert len(engine.requests) == 3 + 2 * refusals


async def test_rows_that_lost_two_engines_run_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_call, "BACKOFF_S", 0.0)
    dying = Dying(10)
    client = client_of({"demo": Engine(dying)})
    answers = await asyncio.gather(*(client.send(row()) for _ in range(5)))
    assert [found.status for found in answers] == [200] * 5
    assert dying.most == 1
    # A suspect that waits holds up no suspect of another model.
    client = client_of({"demo": Engine(Stuck(2)), "other": Engine(Dying(2))})
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        waiting = group.create_task(client.send(row()))
        assert (await client.send(row(CHAT, BODY | {"model": "other"}))).status == 200
        waiting.cancel()


@pytest.mark.parametrize(
    ("error", "status"), [(ReplicaUnavailableError("a"), 503), (ValueError("broken"), 500)]
)
async def test_an_error_of_the_handle_becomes_one_that_is_tried_again(
    error: Exception, status: int, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(answer(error))
    with pytest.raises(RequestError) as raised:
        await client_of({"demo": engine}).send(row())
    assert raised.value.status == status
    assert status in RETRYABLE
    stacks = [record.exc_info[0] for record in caplog.records if record.exc_info]
    assert stacks == ([ValueError] if status == 500 else [])


class Stuck:
    """Engines of which the first ones die, and the next one doesn't answer."""

    def __init__(self, deaths: int = 0) -> None:
        self.left = deaths

    async def __call__(self, request: RelayRequest) -> AsyncGenerator[bytes, None]:
        if self.left > 0:
            self.left -= 1
            raise EngineLostError
        await asyncio.Event().wait()
        yield b""


def test_the_engines_of_an_adapter_are_those_of_its_model() -> None:
    adapted = {"id": "demo", "source": "x", "adapters": [{"source": "org/words", "id": "words"}]}
    handles: Any = {"demo": Engine(answer())}
    client = EngineClient(parse({"models": [adapted]}), handles, Health("llm", ["demo"]))
    assert [client.base_of(name) for name in ("demo", "words", "unknown")] == ["demo", "demo", None]


async def test_an_adapter_s_row_waits_for_the_model_s_first_replica(
    health: dict[str, ModelState],
) -> None:
    model = {"id": "demo", "source": "x", "adapters_folder": "/adapters"}
    engine = Engine(answer(complete(PLAIN, b"{}")))
    handles: Any = {"demo": engine}
    health["demo"] = ModelState(0, False, "an Engine replica")
    clock = Clock()
    client = EngineClient(parse({"models": [model]}), handles, Health("llm", ["demo"]), clock=clock)
    mine = BODY | {"model": "demo:mine"}
    assert list(await client.refresh(wake=True)) == ["demo"]
    for _ in range(2):
        with pytest.raises(RequestError) as raised:
            await client.send(row(CHAT, mine))
        assert raised.value.status in RETRYABLE
    health["demo"] = ModelState(1, False, "")
    engine.stats = [{"adapters": [{"id": "demo:mine", "root": "mine"}]}]
    clock.now += MAX_AGE_S
    assert (await client.send(row(CHAT, mine))).status == 200
    assert [request.adapter for request in engine.requests] == ["demo:mine"]
    assert not await client.refresh(wake=True)
    with pytest.raises(RequestError) as raised:
        await client.send(row(CHAT, BODY | {"model": "none"}))
    assert raised.value.status == 404


async def test_the_load_is_that_of_the_engines_that_have_rows(health: dict[str, ModelState]) -> None:
    engines = {name: Engine(Stuck()) for name in ("demo", "other", "asleep", "unused")}
    one = {"batcher": {"running": 2, "queue_depth": 3}}
    engines["demo"].stats = engines["unused"].stats = [one, one]
    engines["other"].stats = TimeoutError()
    health |= {name: ModelState(2, False, "") for name in engines}
    health["asleep"] = ModelState(0, True, "")
    client = client_of(engines)
    assert await client.load(None) is None
    async with asyncio.TaskGroup() as group:
        rows = [
            group.create_task(client.send(row(CHAT, BODY | {"model": name})))
            for name in ("demo", "other", "asleep")
        ]
        async with asyncio.timeout(LIMIT_S):
            await asyncio.gather(*(engines[name].asked.wait() for name in ("demo", "other", "asleep")))
        assert await client.load(None) == EngineLoad(4, 6)
        assert engines["asleep"].broadcasts == engines["unused"].broadcasts == []
        assert await client.load("demo") == EngineLoad(4, 6)
        assert await client.load("other") is None
        health["demo"] = ModelState(0, True, "")
        assert await client.load(None) is None
        for task in rows:
            task.cancel()
    health["demo"] = ModelState(2, False, "")
    assert await client.load(None) is None
    engines["demo"].answering = answer(complete(PLAIN, b"{}"))
    await client.send(row())
    # Rows that were answered meanwhile count: they may take less time than there is between two looks.
    assert await client.load(None) == EngineLoad(4, 6)
    assert await client.load(None) is None
