"""Calls of an Engine, its rows in the ledger and its reports; vLLM's engine is a double."""

import asyncio
import json
from dataclasses import replace
from typing import Any

import pytest

from batcher import ContinuousBatcher
from serve_app.api.errors import EngineLostError, RequestError
from serve_app.api.scheduling import Scheduling
from serve_app.engine.admission import current
from serve_app.engine.grammar_check import GrammarCheck
from serve_app.engine.llm import Engine
from serve_app.engine.openai_answers import OpenAIAnswers
from serve_app.ledger.calls import CallBook
from serve_app.ledger.rows import Row, Tokens
from serve_app.relay import frame
from serve_app.relay.frame import LOST, unpack
from serve_app.relay.request import RelayRequest
from serve_app.settings.telemetry import SILENT
from serve_app.telemetry.engine import EngineTelemetry
from tests.progress import STILL_S
from tests.serve_app.engine.engine_doubles import REQUEST, FakeEngine, failing
from tests.serve_app.ledger.crashing import FakeSequence


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
    parts._answer_openai = OpenAIAnswers(app, parts._engine, parts._grammars, ready_at=0.0).answer
    parts._routes = {REQUEST.path, "/detokenize", "/generate"}
    return parts


async def answer(engine: Engine, request: RelayRequest = REQUEST) -> tuple[int, Any]:
    (message,) = [message async for message in engine.relay(request)]
    piece = unpack(message)
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body)


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_failure_of_a_dead_engine_is_a_503_that_can_be_tried_elsewhere(admitted: bool) -> None:
    status, body = await answer(made(failing(admitted=admitted), died=True))
    assert (status, body["error"]["type"]) == (503, "service_unavailable")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/responses", "/generate"])
async def test_the_requests_of_an_engine_that_dies_are_lost(path: str) -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        engine._engine.died = True
        await failing(admitted=True)(scope, receive, send)

    async def generate(*_: Any) -> None:
        engine._engine.died = True
        raise RequestError(503, "service_unavailable", "The engine failed")

    engine = made(app)
    engine._routes |= {path}
    engine._max_prompts = 1
    engine._generate = generate
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
    async with asyncio.timeout(STILL_S):
        async for message in engine.relay(replace(REQUEST, path=path)):
            pieces.append(unpack(message))
            begun.set()
    assert [(piece.body, piece.lost) for piece in pieces] == [(b"data: a\n\n", False), (b"", True)]


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
    async with engine._engine.adapters.slots.claim("demo:words"):
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
