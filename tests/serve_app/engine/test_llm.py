"""How an Engine relays what vLLM's application answers; the application and its engine are played."""

import json
from dataclasses import dataclass
from typing import Any

import pytest

from batcher import ContinuousBatcher
from serve_app.api.errors import RequestError
from serve_app.engine import admission
from serve_app.engine.admission import Admission
from serve_app.engine.llm import Engine
from serve_app.relay.asgi import Head, RelayRequest
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
    parts._app = app
    return engine


def failing(status: int = 500, *, admitted: bool = False, refused: bool = False) -> Any:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        request = admission.current.get()
        assert isinstance(request, Admission)
        request.admitted = admitted
        if refused:
            request.refusal = RequestError(429, "rate_limit_error", "full", retry_after_s=3)
        await send({"type": "http.response.start", "status": status, "headers": []})
        await send({"type": "http.response.body", "body": b'{"error": {"message": "oh"}}'})

    return app


async def answer(engine: Engine) -> tuple[int, Any]:
    messages = [message async for message in engine.relay(REQUEST)]
    head, body, whole = Head.unpack(messages[0])
    assert whole
    return head.status, json.loads(body)


async def test_what_fails_before_the_engine_has_it_is_the_request_s_fault() -> None:
    status, body = await answer(made(failing()))
    assert status == 400
    assert body["error"]["message"] == "vLLM can't process this request: oh"


async def test_what_fails_in_the_engine_is_not() -> None:
    status, _ = await answer(made(failing(admitted=True)))
    assert status == 500


@pytest.mark.parametrize("admitted", [False, True])
async def test_what_fails_for_want_of_an_engine_can_be_tried_elsewhere(admitted: bool) -> None:
    status, body = await answer(made(failing(admitted=admitted), died=True))
    assert (status, body["error"]["type"]) == (503, "service_unavailable")


async def test_a_refusal_of_the_gate_goes_before() -> None:
    status, body = await answer(made(failing(refused=True)))
    assert (status, body["error"]["message"]) == (429, "full")
