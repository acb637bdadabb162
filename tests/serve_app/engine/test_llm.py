"""The answers of vLLM's application as an Engine relays them; the application and its engine are doubles."""

import json
from dataclasses import dataclass, replace
from typing import Any

import pytest

from batcher import ContinuousBatcher
from serve_app.api.errors import RequestError
from serve_app.engine.admission import current
from serve_app.engine.grammar_check import MAX_CHARS, GrammarCheck
from serve_app.engine.llm import Engine
from serve_app.relay.frame import unpack
from serve_app.relay.request import RelayRequest
from serve_app.settings.schema import SILENT
from serve_app.telemetry.engine import EngineTelemetry

REQUEST = RelayRequest("POST", "/v1/completions", b"", [], b"{}")


@dataclass
class FakeEngine:
    """Stands for a VLLMEngine."""

    died: bool = False


def made(app: Any, *, died: bool = False) -> Engine:
    # The constructor would start vLLM.
    engine = Engine.__new__(Engine)
    parts: Any = engine
    parts._engine = FakeEngine(died)
    parts._telemetry = EngineTelemetry(SILENT, "demo", ContinuousBatcher(capacity=1))
    parts._id = "demo"
    parts._grammars = GrammarCheck(0.1)
    parts._app = app
    parts._routes = {REQUEST.path}
    return engine


def failing(status: int = 500, *, admitted: bool = False, refused: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        result = current().result
        result.admitted = admitted
        if refused:
            result.refusal = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "oh"}}'})

    return app


async def answer(engine: Engine) -> tuple[int, Any]:
    (message,) = [message async for message in engine.relay(REQUEST)]
    piece = unpack(message)
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body)


async def test_a_failure_before_the_engine_has_the_request_is_a_400() -> None:
    status, body = await answer(made(failing()))
    assert status == 400
    assert body["error"]["message"] == "vLLM can't process this request: oh"


async def test_a_failure_in_the_engine_is_a_500() -> None:
    status, _ = await answer(made(failing(admitted=True)))
    assert status == 500


@pytest.mark.parametrize("admitted", [False, True])
async def test_a_failure_of_a_dead_engine_is_a_503_that_can_be_tried_elsewhere(admitted: bool) -> None:
    status, body = await answer(made(failing(admitted=admitted), died=True))
    assert (status, body["error"]["type"]) == (503, "service_unavailable")


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
    assert f"doesn't serve on {path}" in json.loads(piece.body)["error"]["message"]


async def test_a_hostile_grammar_never_reaches_vllm() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    body = json.dumps({"structured_outputs": {"regex": "a" * (MAX_CHARS + 1)}}).encode()
    (message,) = [each async for each in made(app).relay(replace(REQUEST, body=body))]
    piece = unpack(message)
    assert piece.head is not None
    assert piece.head.status == 400
    assert json.loads(piece.body)["error"]["param"] == "structured_outputs.regex"


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
