"""Answers of vLLM's application, as relay messages; the application and its engine are doubles."""

import asyncio
import json
import time
from dataclasses import replace
from typing import Any

import pytest
from pydantic import BaseModel, ValidationError

from serve_app.engine import arrivals
from serve_app.engine.admission import current
from serve_app.engine.grammar_check import MAX_CHARS, GrammarCheck
from serve_app.engine.grammars import Grammar
from serve_app.engine.openai_answers import OpenAIAnswers
from serve_app.engine.replica import origin_of
from serve_app.ledger.calls import CallBook
from serve_app.relay.frame import KEEP_ALIVE, unpack
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage
from tests.progress import STILL_S
from tests.serve_app.engine.engine_doubles import REQUEST, FakeEngine, failing

LIMIT_S = STILL_S


def made(app: Any, ready_at: float = 0.0) -> OpenAIAnswers:
    engine: Any = FakeEngine()
    return OpenAIAnswers(app, engine, GrammarCheck(0.1, 1.0), ready_at)


async def answer(answers: OpenAIAnswers, request: RelayRequest = REQUEST) -> tuple[int, Any]:
    call = CallBook("demo").open(origin_of(request), RequestUsage())
    messages = answers.answer(request, time.monotonic(), RequestUsage(), call)
    # The process that checks grammars may take seconds to start.
    (message,) = [message async for message in messages if message != KEEP_ALIVE]
    piece = unpack(message)
    assert piece.head is not None
    return piece.head.status, json.loads(piece.body)


@pytest.mark.parametrize("admitted", [False, True])
@pytest.mark.parametrize("output_tokens", [0, 1])
async def test_a_failure_is_not_made_the_request_s_fault(admitted: bool, output_tokens: int) -> None:
    status, body = await answer(made(failing(admitted=admitted, output_tokens=output_tokens)))
    assert (status, body["error"]["message"]) == (500, "oh")


@pytest.mark.parametrize("status", [400, 404, 415, 500])
async def test_an_error_on_a_route_of_anthropic_has_its_shape(status: int) -> None:
    found, body = await answer(made(failing(status)), replace(REQUEST, path="/v1/messages"))
    kind = {404: "not_found_error", 500: "api_error"}.get(status, "invalid_request_error")
    assert (found, body) == (status, {"type": "error", "error": {"type": kind, "message": "oh"}})


@pytest.mark.parametrize(
    ("resumes", "ready_s", "seen_s"),
    [(False, 60.0, 5.0), (True, 60.0, None), (False, 1.0, 1.0)],
    ids=["new", "goes on", "waited for the engine to start"],
)
async def test_a_request_has_the_time_of_its_arrival_at_the_ingress_or_of_the_engine_s_start(
    resumes: bool, ready_s: float, seen_s: float | None
) -> None:
    seen = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        seen.append(current().request.arrived_at)
        raise RuntimeError("oh")

    now = time.monotonic()
    request = replace(REQUEST, arrived_at=time.time() - 5.0, resumes=resumes)
    await answer(made(app, now - ready_s), request)
    assert seen == [None if seen_s is None else pytest.approx(now - seen_s, abs=0.5)]


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


@pytest.mark.parametrize("output_tokens", [0, 1])
async def test_an_application_that_fails_behind_its_head_is_a_500_with_its_stack_in_the_log(
    output_tokens: int, caplog: pytest.LogCaptureFixture
) -> None:
    status, body = await answer(made(breaking(output_tokens=output_tokens)))
    assert (status, body["error"]["type"]) == (500, "internal_error")
    (record,) = [record for record in caplog.records if record.exc_info]
    assert "fault of the service" in record.message


async def test_a_stream_whose_application_breaks_off_ends_with_an_error_event(
    caplog: pytest.LogCaptureFixture,
) -> None:
    left = asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        current().result.admitted = True
        headers = [(b"content-type", b"text/event-stream")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"data: a\n\n", "more_body": True})
        await left.wait()
        raise KeyError("inside")

    call = CallBook("demo").open(origin_of(REQUEST), RequestUsage())
    messages = made(app).answer(REQUEST, time.monotonic(), RequestUsage(), call)
    assert unpack(await anext(messages)).body == b"data: a\n\n"
    left.set()
    (last,) = [unpack(message) async for message in messages if message != KEEP_ALIVE]
    assert last.usage is not None
    error = json.loads(last.body.removeprefix(b"data: "))["error"]
    assert (error["type"], error["code"], "inside" in error["message"]) == ("internal_error", 500, False)
    assert [record.exc_info[0] for record in caplog.records if record.exc_info] == [KeyError]


async def test_a_refusal_of_the_batcher_goes_before() -> None:
    status, body = await answer(made(failing(refused=True)))
    assert (status, body["error"]["message"]) == (429, "full")


async def test_a_hostile_grammar_never_reaches_vllm() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None:
        raise AssertionError

    body = json.dumps({"structured_outputs": {"regex": "a" * (MAX_CHARS + 1)}}).encode()
    status, found = await answer(made(app), replace(REQUEST, body=body))
    assert (status, found["error"]["param"]) == (400, "structured_outputs.regex")


class HeldCheck(GrammarCheck):
    """A check that ends when `go` is set."""

    def __init__(self) -> None:
        super().__init__(0.1, 1.0)
        self.go = asyncio.Event()

    async def check(self, grammars: list[Grammar]) -> None:
        await self.go.wait()
        await super().check(grammars)


@pytest.mark.parametrize(("characters", "message"), [(1, "oh"), (MAX_CHARS + 1, "at most")])
async def test_a_request_whose_grammar_takes_long_to_check_has_keep_alives(
    monkeypatch: pytest.MonkeyPatch, characters: int, message: str
) -> None:
    monkeypatch.setattr("serve_app.relay.keepalive.KEEPALIVE_S", 0.001)
    grammars = HeldCheck()
    engine: Any = FakeEngine()
    answers = OpenAIAnswers(failing(), engine, grammars, ready_at=0.0)
    body = json.dumps({"structured_outputs": {"regex": "a" * characters}}).encode()
    request = replace(REQUEST, body=body)
    call = CallBook("demo").open(origin_of(request), RequestUsage())
    async with asyncio.timeout(LIMIT_S):
        messages = answers.answer(request, time.monotonic(), RequestUsage(), call)
        assert await anext(messages) == KEEP_ALIVE
        grammars.go.set()
        *_, last = [each async for each in messages]
    await grammars.stop()
    assert message in json.loads(unpack(last).body)["error"]["message"]


@pytest.mark.parametrize(("tokens", "status"), [(1_000, 200), (2_000, 400)])
async def test_a_list_of_token_ids_that_is_too_long_is_not_parsed(tokens: int, status: int) -> None:
    body = json.dumps({"model": "demo", "tokens": [7] * tokens}).encode()
    answers = made(failing(200, admitted=True))
    found, answered = await answer(answers, replace(REQUEST, path="/detokenize", body=body))
    assert found == status
    if status == 400:
        error = answered["error"]
        assert (error["param"], "max_tokenize_tokens" in error["message"]) == ("tokens", True)


async def test_the_size_of_a_body_goes_with_its_request() -> None:
    sizes = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        sizes.append(current().request.size)
        await failing(200, admitted=True)(scope, receive, send)

    await answer(made(app))
    assert sizes == [len(REQUEST.body)]


async def test_the_queues_know_the_adapter_of_a_request() -> None:
    shares = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        shares.append(current().request.share)
        await failing()(scope, receive, send)

    answers = made(app)
    for adapter in ("", "demo:words"):
        await answer(answers, replace(REQUEST, adapter=adapter))
    assert shares == ["default", "default/demo:words"]


async def test_a_flex_request_begins_when_the_others_have_asked_for_their_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(arrivals, "MOST_WAIT_S", LIMIT_S)
    begun: list[str] = []
    asked, ended = asyncio.Event(), asyncio.Event()

    async def app(scope: Any, receive: Any, send: Any) -> None:
        admission = current()
        begun.append("flex" if admission.request.scheduling.priority > 0 else "live")
        if begun == ["live"]:
            await asked.wait()
            admission.result.ask()
            await ended.wait()
        raise RuntimeError("oh")

    answers = made(app)
    live = asyncio.ensure_future(answer(answers))
    await asyncio.sleep(0)
    flex = replace(REQUEST, scheduling=REQUEST.scheduling._replace(priority=1))
    rows = [asyncio.ensure_future(answer(answers, flex)) for _ in range(2)]
    for _ in range(5):
        await asyncio.sleep(0)
    assert begun == ["live"]
    asked.set()
    # Each of these ends without a slot.
    async with asyncio.timeout(LIMIT_S):
        await asyncio.gather(*rows)
    assert (begun, live.done()) == (["live", "flex", "flex"], False)
    ended.set()
    await live
