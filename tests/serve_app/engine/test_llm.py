"""The answers of vLLM's application as an Engine relays them; the application and its engine are doubles."""

import asyncio
import json
from dataclasses import dataclass, field, replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from batcher import ContinuousBatcher
from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.scheduling import Scheduling
from serve_app.engine.adapter_slots import AdapterSlots
from serve_app.engine.admission import current
from serve_app.engine.grammar_check import MAX_CHARS, GrammarCheck
from serve_app.engine.llm import Engine
from serve_app.engine.vllm_engine import Completion
from serve_app.relay import frame
from serve_app.relay.frame import LOST, unpack
from serve_app.relay.request import RelayRequest
from serve_app.settings.telemetry import SILENT
from serve_app.telemetry.engine import EngineTelemetry
from serve_app.usage.calls import CallBook
from serve_app.usage.rows import Row, Tokens
from tests.serve_app.usage.crashing import FakeSequence

REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")


class FakeAdapters:
    """Stands for the adapters of a VLLMEngine."""

    def __init__(self) -> None:
        self.slots = AdapterSlots(2)

    async def check(self, id: str) -> None:
        if id != "demo:words":
            raise RequestError(404, "not_found_error", f"no {id!r}; served here: demo, demo:words")


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False
    max_tokenize_tokens: int = 1_000
    max_model_len: int = 2_048
    adapters: FakeAdapters = field(default_factory=FakeAdapters)


def made(app: Any, *, died: bool = False) -> Any:
    """Return an `Engine`, of whose parts a test may change any."""
    # The constructor would start vLLM.
    parts: Any = Engine.__new__(Engine)
    parts._engine = FakeEngine(died)
    parts._book = CallBook("demo")
    parts._book.keep_ended()
    parts._telemetry = EngineTelemetry(SILENT, "demo", ContinuousBatcher(capacity=1))
    parts._id = "demo"
    parts._grammars = GrammarCheck(0.1, 1.0)
    parts._app = app
    parts._routes = {REQUEST.path, "/detokenize", "/generate"}
    return parts


def failing(
    status: int = 500, *, admitted: bool = False, refused: bool = False, output_tokens: int = 0
) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        result = current().result
        result.admitted = admitted
        result.usage.output_tokens = output_tokens
        if refused:
            result.refusal = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "oh"}}'})

    return app


async def answer(engine: Engine, request: RelayRequest = REQUEST) -> tuple[int, Any]:
    (message,) = [message async for message in engine.relay(request)]
    piece = unpack(message)
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body)


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_failure_before_the_first_token_is_a_400(admitted: bool) -> None:
    status, body = await answer(made(failing(admitted=admitted)))
    assert status == 400
    assert body["error"]["message"] == "vLLM can't process this request: oh"


async def test_a_failure_after_the_first_token_is_a_500() -> None:
    status, _ = await answer(made(failing(admitted=True, output_tokens=1)))
    assert status == 500


class Field(BaseModel):
    """A field that an application of vLLM checks too late."""

    background: bool


def breaking(*, output_tokens: int = 0) -> Any:
    """Return an application that fails behind the head of a stream, as vLLM's does on some values."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current().result.usage.output_tokens = output_tokens
        await send({"type": "http.response.start", "status": 200, "headers": []})
        try:
            Field(background=None)  # type: ignore[arg-type]
        except ValidationError as error:
            raise RuntimeError("response already started") from error

    return app


async def test_an_application_that_fails_behind_its_head_is_a_400_with_the_field() -> None:
    status, body = await answer(made(breaking()))
    assert status == 400
    message = body["error"]["message"]
    assert message == "vLLM can't process this request: background: Input should be a valid boolean"


async def test_one_that_fails_with_tokens_fails_the_call() -> None:
    with pytest.raises(RuntimeError, match="already started"):
        await answer(made(breaking(output_tokens=1)))


async def test_a_grammar_that_the_engine_can_not_follow_is_a_400() -> None:
    engine = made(failing(admitted=True, output_tokens=1))
    body = b'{"structured_outputs": {"grammar": "root ::= root"}}'
    try:
        status, _ = await answer(engine, RelayRequest("POST", REQUEST.path, b"", [], body))
    finally:
        await engine._grammars.stop()
    assert status == 400


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_failure_of_a_dead_engine_is_a_503_that_can_be_tried_elsewhere(admitted: bool) -> None:
    status, body = await answer(made(failing(admitted=admitted), died=True))
    assert (status, body["error"]["type"]) == (503, "service_unavailable")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/generate"])
async def test_the_requests_of_an_engine_that_dies_are_lost(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        engine._engine.died = True
        await failing(admitted=True)(scope, receive, send)

    async def generate(*_: Any) -> None:
        engine._engine.died = True
        raise RequestError(503, "service_unavailable", "The engine failed")

    engine = made(app)
    engine._routes |= {path}
    engine._max_prompts = 1
    monkeypatch.setattr(engine, "_generate", generate)
    body = b'{"prompts": ["a"]}'
    messages = [message async for message in engine.relay(replace(REQUEST, path=path, body=body))]
    assert messages == [LOST]
    with pytest.raises(RequestError, match="Try again"):
        await engine.generate({"prompts": ["a"]})
    engine._engine.died = False
    with pytest.raises(EngineLostError):
        await engine.generate({"prompts": ["a"]})


async def test_an_answer_that_is_too_large_for_one_message_comes_in_parts(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(frame, "MAX_BODY_BYTES", 10)
    messages = [message async for message in made(failing(200, admitted=True)).relay(REQUEST)]
    assert len(messages) == 3
    assert b"".join(unpack(message).body for message in messages) == b'{"error": {"message": "oh"}}'


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses"])
async def test_a_stream_of_an_engine_that_dies_is_lost_on_every_route(path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        current().result.admitted = True
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await begun.wait()
        engine._engine.died = True
        await send({"type": "http.response.body", "body": b"data: an error\n\n"})

    begun = asyncio.Event()
    engine = made(app)
    engine._routes |= {path}
    pieces = []
    async with asyncio.timeout(5):
        async for message in engine.relay(replace(REQUEST, path=path)):
            pieces.append(unpack(message))
            begun.set()
    assert [(piece.body, piece.lost) for piece in pieces] == [(b"data: a\n\n", False), (b"", True)]


async def test_a_refusal_of_the_batcher_goes_before() -> None:
    status, body = await answer(made(failing(refused=True)))
    assert (status, body["error"]["message"]) == (429, "full")


@pytest.mark.parametrize("path", ["/v1/embeddings", "/v1/audio/transcriptions"])
async def test_a_route_that_vllm_has_not_for_this_model_is_a_400(path: str) -> None:
    engine = made(failing())
    (message,) = [each async for each in engine.relay(replace(REQUEST, path=path))]
    piece = unpack(message)
    assert piece.head is not None
    assert piece.head.status == 400
    message = json.loads(piece.body)["error"]["message"]
    assert message == f"model: 'demo' serves /generate and /v1/completions, not {path}"


async def test_a_model_that_generates_nothing_says_what_it_serves() -> None:
    engine = made(failing())
    engine._routes = {"/v1/embeddings", "/score", "/v1/score", "/classify", "/tokenize"}
    status, body = await answer(engine, replace(REQUEST, path="/generate"))
    served = "model: 'demo' serves /v1/embeddings, /v1/classify and /v1/score, not /generate"
    assert (status, body["error"]["message"], body["error"]["param"]) == (400, served, "model")
    engine._max_prompts = 1
    with pytest.raises(RequestError) as caught:
        await engine.generate({"prompts": ["a"]})
    assert (caught.value.status, caught.value.message) == (400, served)


async def test_a_hostile_grammar_never_reaches_vllm() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    body = json.dumps({"structured_outputs": {"regex": "a" * (MAX_CHARS + 1)}}).encode()
    (message,) = [each async for each in made(app).relay(replace(REQUEST, body=body))]
    piece = unpack(message)
    assert piece.head is not None
    assert piece.head.status == 400
    assert json.loads(piece.body)["error"]["param"] == "structured_outputs.regex"


@pytest.mark.parametrize(("tokens", "status"), [(1_000, 200), (2_000, 400)])
async def test_a_list_of_token_ids_that_is_too_long_is_not_parsed(tokens: int, status: int) -> None:
    body = json.dumps({"model": "demo", "tokens": [7] * tokens}).encode()
    engine = made(failing(200, admitted=True))
    (message,) = [each async for each in engine.relay(replace(REQUEST, path="/detokenize", body=body))]
    piece = unpack(message)
    assert piece.head is not None
    assert piece.head.status == status
    if status == 400:
        error = json.loads(piece.body)["error"]
        assert (error["param"], "max_tokenize_tokens" in error["message"]) == ("tokens", True)


async def test_the_size_of_a_body_goes_with_its_request() -> None:
    sizes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sizes.append(current().request.size)
        await failing(200, admitted=True)(scope, receive, send)

    await answer(made(app))
    assert sizes == [len(REQUEST.body)]


async def test_the_tokens_of_a_call_are_reported_until_it_ends() -> None:
    reported = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        reported.append(engine.record_routing_stats())
        await failing(200, admitted=True)(scope, receive, send)

    engine = made(app)
    messages = [message async for message in engine.relay(replace(REQUEST, tokens=1_000))]
    assert messages
    assert reported == [{"tokens": 1_024}]
    assert engine.record_routing_stats() == {"tokens": 0}


async def test_the_tokens_of_a_call_over_the_handle_are_estimated() -> None:
    engine = made(failing())
    parts: Any = engine
    parts._max_prompts = 1
    reported = []

    async def generate(*_: object) -> Any:
        reported.append(engine.record_routing_stats())
        raise RequestError(400, "invalid_request_error", "no")

    parts._generate = generate
    with pytest.raises(RequestError):
        await engine.generate({"prompts": ["x" * 4_000], "max_tokens": 24})
    assert reported == [{"tokens": 1_024}]
    assert engine.record_routing_stats() == {"tokens": 0}


async def test_the_adapters_that_are_loaded_are_reported() -> None:
    engine = made(failing())
    async with engine._engine.adapters.slots.using("demo:words"):
        assert engine.record_routing_stats() == {"tokens": 0, "adapters": ["demo:words"]}


async def test_an_adapter_that_is_not_served_is_a_404_with_those_that_are() -> None:
    engine = made(failing(200, admitted=True))
    status, body = await answer(engine, replace(REQUEST, adapter="demo:none"))
    assert (status, "served here: demo, demo:words" in body["error"]["message"]) == (404, True)
    status, _ = await answer(engine, replace(REQUEST, adapter="demo:words"))
    assert status == 200
    engine._max_prompts = 1
    with pytest.raises(RequestError, match="served here"):
        await engine.generate({"prompts": ["x"], "model": "demo:none"})


async def test_the_ledger_has_the_adapter_of_a_call() -> None:
    engine = made(working())
    request = replace(REQUEST, adapter="demo:words")
    assert [message async for message in engine.relay(request)]
    (row,) = rows(engine)
    assert (row.model, row.adapter) == ("demo", "demo:words")


def rows(engine: Any) -> list[Row]:
    return [call.row(0.0) for call in engine._book.take()[1]]


def working(part_ends: bool = True) -> Any:
    """Return an application whose engine samples three tokens."""

    async def app(scope: Any, receive: Any, send: Any) -> None:
        result = current().result
        assert result.call
        result.admitted = True
        part = result.call.part()
        part.begin(FakeSequence(Tokens(10, 4, 3)))
        await send({"type": "http.response.start", "status": 200, "headers": STREAM})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": part_ends is False})
        if part_ends:
            part.end()
        else:
            try:
                await receive()
                await receive()
            finally:
                part.end("cancelled")

    return app


STREAM = [(b"content-type", b"text/event-stream")]


async def test_a_call_that_the_engine_ran_has_a_row_with_its_origin() -> None:
    engine = made(working())
    request = replace(
        REQUEST,
        headers=[(b"x-request-id", b"r-1")],
        scheduling=Scheduling(1, "acme"),
        key="ada",
        source="batch",
        resumes=True,
    )
    async for _ in engine.relay(request):
        pass
    (row,) = rows(engine)
    assert (row.key, row.tenant, row.tier, row.source) == ("ada", "acme", "flex", "batch")
    assert (row.endpoint, row.request_id, row.resumed) == ("/v1/completions", "r-1", True)
    assert (row.prompt_tokens, row.cached_tokens, row.output_tokens) == (10, 4, 3)
    assert row.outcome == "ok"


async def test_the_row_of_a_call_whose_client_left_waits_for_the_end_of_its_work() -> None:
    engine = made(working(part_ends=False))
    messages = engine.relay(REQUEST)
    await anext(messages)
    await messages.aclose()
    # The application is told, and ends what it began.
    assert rows(engine) == []
    for _ in range(10):
        await asyncio.sleep(0)
    assert [(row.outcome, row.output_tokens) for row in rows(engine)] == [("cancelled", 3)]


async def test_a_call_of_an_engine_that_died_is_lost() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        await working()(scope, receive, send)
        engine._engine.died = True

    engine = made(app)
    async for _ in engine.relay(REQUEST):
        pass
    assert [row.outcome for row in rows(engine)] == ["lost"]


async def test_the_queues_know_the_adapter_of_a_request() -> None:
    shares = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        shares.append(current().request.share)
        await failing()(scope, receive, send)

    engine = made(app)
    for adapter in ("", "demo:words"):
        await answer(engine, replace(REQUEST, adapter=adapter))
    assert shares == ["default", "default/demo:words"]


async def test_the_queues_know_the_adapter_of_a_generate_call() -> None:
    shares = []

    class Generating(FakeEngine):
        def sampling(self, request: Any) -> None:
            pass

        async def tokenize(self, prompts: list[str]) -> list[list[int]]:
            shares.append(current().request.share)
            return [[1] for _ in prompts]

        async def complete(self, token_ids: list[int], sampling: None, adapter: str) -> Completion:
            shares.append(current().request.share)
            return Completion("", "stop", 1)

    engine = made(failing())
    engine._engine = Generating()
    engine._max_prompts = 2
    response = await engine.generate({"prompts": ["a", "b"], "model": "demo:words"})
    assert response["results"] == ["", ""]
    assert shares == ["default/demo:words"] * 3


async def test_a_refused_call_has_no_row() -> None:
    engine = made(failing(refused=True))
    await answer(engine)
    assert rows(engine) == []


async def test_a_call_over_the_handle_has_a_row() -> None:
    engine = made(failing())
    parts: Any = engine
    parts._max_prompts = 1

    async def generate(request: Any, scheduling: Any, usage: Any, call: Any, adapter: str) -> Any:
        part = call.part()
        part.begin(FakeSequence(Tokens(10, 4, 3)))
        part.end()
        raise RequestError(400, "invalid_request_error", "no")

    parts._generate = generate
    with pytest.raises(RequestError):
        await engine.generate({"prompts": ["a"], "tenant": "acme", "service_tier": "priority"})
    (row,) = rows(engine)
    assert (row.source, row.endpoint, row.tenant, row.tier) == ("handle", "generate", "acme", "priority")
