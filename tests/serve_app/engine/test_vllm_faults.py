"""Exceptions in vLLM's own application, of a model that generates: the request's fault, or the service's.

The application is vLLM's; its engine is a double that yields and raises what a test wants.
"""

import gc
import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import AsyncExitStack
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from vllm.exceptions import VLLMValidationError
from vllm.outputs import CompletionOutput, RequestOutput
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineGenerateError
from vllm.v1.engine.input_processor import InputProcessor
from vllm.v1.serial_utils import MsgpackEncoder

from serve_app.engine.openai import OpenAI
from serve_app.engine.stream_interval import StreamIntervals
from serve_app.relay.frame import KEEP_ALIVE, unpack
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.engine_doubles import REQUEST, PlayedEngine, Site, new_job
from tests.serve_app.engine.pooling_application import Application

MESSAGES = [{"role": "user", "content": "a"}]
COUNT = "/v1/messages/count_tokens"
BODIES: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": MESSAGES},
    "/v1/completions": {"prompt": "a"},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 8},
    "/v1/responses": {"input": "a"},
    COUNT: {"messages": MESSAGES},
}
GRAMMAR = {"structured_outputs": {"choice": ["a"]}}

every_route = pytest.mark.parametrize("path", [path for path in BODIES if path != COUNT])
whole_and_stream = pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])


def result(text: str = "", finish: str | None = None) -> RequestOutput:
    """Return an output of the engine."""
    tokens = [7] if text else []
    part = CompletionOutput(0, text, tokens, cumulative_logprob=None, logprobs=None, finish_reason=finish)
    return RequestOutput("r", "a", [1], None, [part], finished=finish is not None)


class Service:
    """Answers requests through vLLM's application.

    Attributes:
        script: Outputs of the engine; a function is called, and raises.
    """

    def __init__(self, openai: OpenAI, site: Site) -> None:
        self.script: list[RequestOutput | Callable[[], Any]] = []
        self._openai = openai
        self._site = site

    async def ask(self, path: str, stream: bool, **more: Any) -> tuple[int, str]:
        """Return the status and the body of the answer to a request."""
        body = json.dumps({"model": "demo", "stream": stream} | BODIES[path] | more).encode()
        headers = [(b"content-type", b"application/json"), (b"x-request-id", b"mine")]
        request = replace(REQUEST, path=path, body=body, headers=headers)
        job = new_job(request, facts={"runs": path != COUNT, "size": len(body)})
        await self._site.door.admit(job)
        try:
            messages = self._openai.answer(job)
            pieces = [unpack(message) async for message in messages if message != KEEP_ALIVE]
        finally:
            if job.slot is not None and not job.placed:
                job.slot.release()
        assert pieces[0].head is not None
        assert pieces[-1].usage is not None, "the answer is complete"
        return pieces[0].head.status, b"".join(piece.body for piece in pieces).decode()

    async def generate(self, *_: Any, **__: Any) -> AsyncGenerator[RequestOutput, None]:
        """Do as vLLM's own `generate`."""
        for each in self.script:
            yield each if isinstance(each, RequestOutput) else each()


@pytest.fixture
async def service(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Service]:
    application = Application(DEMO_MODEL, ("generate",), runner="generate")
    llm: Any = application.llm
    llm.intervals = StreamIntervals()
    llm.max_prompt_logprobs = 100
    llm.input_processor = SimpleNamespace(vllm_config=llm.vllm_config, tokenizer=None)
    llm.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
    monkeypatch.setattr(AsyncLLM, "errored", property(lambda _: False))
    monkeypatch.setattr(AsyncLLM, "check_admission", lambda *_, **__: None)
    monkeypatch.setattr(AsyncLLM, "is_tracing_enabled", lambda _: _never(), raising=False)
    async with AsyncExitStack() as stack:
        await application.start(stack)
        engine: Any = PlayedEngine()
        service = Service(OpenAI(application.app, engine), application.site)
        monkeypatch.setattr(
            AsyncLLM, "generate", lambda _, *args, **options: service.generate(*args, **options)
        )
        yield service
        # The stacks hold the slots of their requests, which the batcher waits for.
        caplog.get_records("call").clear()
        gc.collect()


async def _never() -> bool:
    return False


def stacks(caplog: pytest.LogCaptureFixture) -> list[type[BaseException] | None]:
    """Return the kinds of the exceptions whose stacks are in the service's log."""
    return [record.exc_info[0] for record in caplog.records if record.name == "ray.serve" and record.exc_info]


def error_of(text: str) -> Any:
    """Return the error in a body: the whole of it, or that of its last event."""
    last = text.strip().split("\n\n")[-1].split("data: ")[-1]
    return json.loads(last)["error"]


def ours() -> None:
    raise KeyError("inside")


def ours_by_a_value() -> None:
    raise ValueError("inside")


def of_vllm() -> None:
    """Raise vLLM's own ValueError about a value."""
    request: Any = SimpleNamespace(external_req_id="a", request_id="b")
    InputProcessor.assign_request_id(request)


def of_a_class_of_vllm() -> None:
    raise VLLMValidationError("too hot", parameter="temperature")


def too_large() -> None:
    """Do as vLLM with a value that it can't pack for its engine."""
    try:
        MsgpackEncoder().encode(2**64)
    except OverflowError as error:
        raise EngineGenerateError from error


def in_the_engine() -> None:
    """Do as vLLM with any exception in its client."""
    try:
        ours_by_a_value()
    except ValueError as error:
        raise EngineGenerateError from error


RAISED = {ours: KeyError, ours_by_a_value: ValueError, in_the_engine: EngineGenerateError}


@every_route
@whole_and_stream
@pytest.mark.parametrize("fault", list(RAISED))
async def test_a_fault_of_the_service_is_a_500_before_any_token_with_its_stack_in_the_log(
    service: Service,
    path: str,
    stream: bool,
    fault: Callable[[], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.script = [fault]
    status, text = await service.ask(path, stream)
    assert status == 500, text
    error = error_of(text)
    assert error["type"] == ("api_error" if path == "/v1/messages" else "internal_error")
    assert "inside" not in text
    assert stacks(caplog) == [RAISED[fault]]
    assert "mine" in caplog.text


@every_route
@whole_and_stream
@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (of_vllm, "external_req_id"),
        (of_a_class_of_vllm, "too hot"),
        (too_large, "2**64"),
    ],
)
async def test_a_fault_of_the_request_is_a_400_before_the_stream_with_vllm_s_reason(
    service: Service,
    path: str,
    stream: bool,
    fault: Callable[[], None],
    reason: str,
    caplog: pytest.LogCaptureFixture,
) -> None:
    service.script = [fault]
    status, text = await service.ask(path, stream)
    assert status == 400, text
    error = error_of(text)
    assert reason in error["message"]
    if path == "/v1/messages":
        assert error["type"] == "invalid_request_error"
    assert stacks(caplog) == []


@every_route
async def test_a_fault_behind_the_first_token_is_the_last_event_of_the_stream(
    service: Service, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [result("a"), ours]
    status, text = await service.ask(path, stream=True)
    if status == 200:
        assert error_of(text)["type"] == ("api_error" if path == "/v1/messages" else "internal_error")
        assert ("event: error" in text) == (path in ("/v1/messages", "/v1/responses"))
        assert "[DONE]" not in text
    else:
        # It was there before the first token had left.
        assert status == 500
    assert stacks(caplog) == [KeyError]


@whole_and_stream
@pytest.mark.parametrize(("more", "status"), [({}, 500), (GRAMMAR, 400)], ids=["no grammar", "a grammar"])
async def test_an_answer_that_the_engine_gives_up_is_its_grammar_s_fault_if_it_has_one(
    service: Service, stream: bool, more: dict[str, Any], status: int
) -> None:
    service.script = [result("a", finish="error")]
    found, text = await service.ask("/v1/chat/completions", stream, **more)
    assert (error_of(text)["code"], found in (status, 200 if stream else status)) == (status, True)


@pytest.mark.parametrize("path", ["/v1/messages", COUNT])
@pytest.mark.parametrize("wrong", [{"messages": 5}, {"messages": [{"role": "nobody"}]}, {"tools": 5}])
async def test_vllm_s_own_refusals_have_anthropic_s_shape(
    service: Service, path: str, wrong: dict[str, Any]
) -> None:
    status, text = await service.ask(path, False, **wrong)
    assert status == 400, text
    answered = json.loads(text)
    assert (answered["type"], answered["error"]["type"]) == ("error", "invalid_request_error")
    assert answered["error"]["message"]
