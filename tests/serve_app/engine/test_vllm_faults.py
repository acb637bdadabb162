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

from serve_app.engine.vllm.stats import slot_usage
from serve_app.settings.sources import DEMO_MODEL
from serve_app.wire.usage import Tokens
from tests.serve_app.engine.engine_doubles import CONTEXT, REQUEST, PlayedReplica, Site, new_job
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


class Sampled:
    """Stands for a sequence of the engine that has a token."""

    def tokens(self) -> Tokens:
        return Tokens(1, 0, 1)

    def ended(self) -> bool:
        return True


class Service:
    """Answers requests through vLLM's application.

    Attributes:
        script: Outputs of the engine; a function is called, and raises.
        adding: Called as a prompt is added to the engine, and raises; None: prompts are added.
    """

    def __init__(self, replica: PlayedReplica, site: Site) -> None:
        self.script: list[RequestOutput | Callable[[], Any]] = []
        self.adding: Callable[[], Any] | None = None
        self._replica = replica
        self._site = site

    async def ask(self, path: str, stream: bool, **more: Any) -> tuple[int, str]:
        """Return the status and the body of the answer to a request."""
        content = {"model": "demo", "stream": stream} | BODIES.get(path, {}) | more
        return await self.send(path, json.dumps(content).encode(), **more)

    async def send(
        self, path: str, body: bytes, content_type: bytes = b"application/json", **more: Any
    ) -> tuple[int, str]:
        """Return the status and the body of the answer to a body; `more` are fields that it states."""
        headers = [(b"content-type", content_type), (b"x-request-id", b"mine")]
        request = replace(REQUEST, path=path, body=body, headers=headers)
        facts: dict[str, Any] = {"runs": path in BODIES and path != COUNT, "size": len(body)}
        if (most := more.get("max_tokens")) is not None:
            facts["output"] = max(1, most)
        job = new_job(request, facts=facts)
        await self._site.door.admit(job)
        try:
            pieces = [piece async for piece in self._replica.answer(job)]
        finally:
            if job.slot is not None and not job.placed:
                job.slot.release()
        assert pieces[0].head is not None
        assert pieces[-1].usage is not None, "the answer is complete"
        return pieces[0].head.status, b"".join(piece.body for piece in pieces).decode()

    async def generate(
        self, llm: Any, prompt: Any, params: Any, request_id: str, **_: Any
    ) -> AsyncGenerator[RequestOutput, None]:
        """Do as vLLM's own `generate`."""
        if self.adding is not None:
            await llm.add_request(request_id, prompt, params)
        for each in self.script:
            if isinstance(each, RequestOutput) and (usage := slot_usage.get()):
                usage.count(Sampled())
            yield each if isinstance(each, RequestOutput) else each()


@pytest.fixture(scope="module")
def played() -> Application:
    return Application(DEMO_MODEL, ("generate",), runner="generate")


@pytest.fixture
async def service(
    played: Application, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> AsyncIterator[Service]:
    application, llm = played, played.llm
    # Each start puts its own bound around them.
    for name in ("_tokenize_prompt", "_tokenize_prompt_async"):
        monkeypatch.setattr(llm.renderer, name, getattr(llm.renderer, name))
    llm.input_processor = SimpleNamespace(vllm_config=llm.vllm_config, tokenizer=None)
    llm.output_processor = SimpleNamespace(external_req_ids={}, request_states={})
    monkeypatch.setattr(AsyncLLM, "errored", property(lambda _: False))
    monkeypatch.setattr(AsyncLLM, "check_admission", lambda *_, **__: None)
    monkeypatch.setattr(AsyncLLM, "is_tracing_enabled", lambda _: _never(), raising=False)
    async with AsyncExitStack() as stack:
        await application.start(stack)
        service = Service(PlayedReplica(application.app), application.site)
        monkeypatch.setattr(AsyncLLM, "generate", lambda *args, **options: service.generate(*args, **options))

        async def add_request(*_: Any, **__: Any) -> None:
            assert service.adding is not None
            service.adding()

        monkeypatch.setattr(AsyncLLM, "add_request", add_request)
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
    MsgpackEncoder().encode(2**64)


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
    service.adding = fault
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


CHAT, COMPLETIONS, RESPONSES = "/v1/chat/completions", "/v1/completions", "/v1/responses"
MISTAKES: list[tuple[str, dict[str, Any], str | None, str]] = [
    (CHAT, {"temperature": "hot"}, "temperature", "Input should be a valid number, unable to parse"),
    (CHAT, {"stop": 3}, "stop", "Input should be a valid string or a valid list"),
    (CHAT, {"structured_outputs": [-1]}, None, "object has no attribute 'get'"),
    (CHAT, {"messages": "a"}, "messages", "Input should be a valid list"),
    (CHAT, {"messages": [{"role": "user", "content": "a", "name": 5}]}, "messages[0].name", "valid string"),
    (CHAT, {"messages": [{"role": "user", "content": 5}]}, "messages[0].content", "valid string or"),
    (CHAT, {"tools": [{"type": "function"}]}, "tools[0].function", "required, but missing"),
    (CHAT, {"top_p": 7}, "top_p", "top_p must be in (0, 1], got 7.0."),
    (CHAT, {"response_format": {"type": "json_schema"}}, "response_format", "'json_schema' field must be"),
    (COMPLETIONS, {"n": "x"}, "n", "Input should be a valid integer"),
    (COMPLETIONS, {"prompt": {"a": 1}}, "prompt", "Input should be a valid"),
    (COMPLETIONS, {"max_tokens": -1}, "max_tokens", "max_tokens must be at least 1, got -1."),
    (RESPONSES, {"input": [{"role": "user", "content": 5}]}, "input[0].content", "Input should be a valid"),
    (RESPONSES, {"metadata": {"a": 5}}, "metadata.a", "Input should be a valid string"),
    ("/tokenize", {"messages": 5}, "messages", "Input should be a valid list"),
    ("/detokenize", {"tokens": ["a"]}, "tokens[0]", "Input should be a valid integer"),
]


@pytest.mark.parametrize(("path", "wrong", "param", "reason"), MISTAKES, ids=str)
async def test_a_wrong_body_is_refused_in_the_words_of_the_service(
    service: Service, path: str, wrong: dict[str, Any], param: str | None, reason: str
) -> None:
    status, text = await service.ask(path, False, **wrong)
    assert status == 400, text
    error = error_of(text)
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", param, 400)
    assert reason in error["message"]
    for form in ("body.", "validation error", "'loc'", "parameter=", chr(10)):
        assert form not in error["message"]


@pytest.mark.parametrize("body", [b"", b"null", b"5", b"[]", b"{"])
async def test_a_body_that_is_no_object_is_refused_as_one(service: Service, body: bytes) -> None:
    for path in (CHAT, "/tokenize"):
        status, text = await service.send(path, body)
        error = error_of(text)
        assert (status, error["param"], error["message"]) == (400, None, "The body must be a JSON object")


@pytest.mark.parametrize("content_type", [b"text/plain", b"\xff", b""])
async def test_a_body_of_another_type_is_no_fault_of_the_service(
    service: Service, content_type: bytes
) -> None:
    for path in (CHAT, COMPLETIONS, RESPONSES, "/tokenize"):
        status, text = await service.send(path, json.dumps(BODIES.get(path, {})).encode(), content_type)
        error = error_of(text)
        assert (status, error["param"]) == (400, None)
        assert "application/json" in error["message"]


async def test_a_prompt_that_fills_the_context_is_an_overflow_by_each_route(service: Service) -> None:
    async def tokens(content: str) -> int:
        said = [{"role": "user", "content": content}]
        return int(json.loads((await service.ask(COUNT, False, messages=said))[1])["input_tokens"])

    fits = CONTEXT - await tokens("")
    assert await tokens("a" * fits) == CONTEXT
    for more in (0, 1):
        content = "a" * (fits + more)
        for path, fields in (
            (CHAT, {"messages": [{"role": "user", "content": content}]}),
            (RESPONSES, {"input": content}),
            (COMPLETIONS, {"prompt": [7] * (CONTEXT + more), "max_tokens": None}),
        ):
            status, text = await service.ask(path, False, **fields)
            error = error_of(text)
            assert (status, error["code"]) == (400, "context_length_exceeded"), (path, more, text)
            assert (error["type"], error["param"]) == ("invalid_request_error", None)
            assert "maximum context length" in error["message"]
    # A length of 0 is the mistake of the request.
    error = error_of((await service.ask(CHAT, False, max_tokens=0))[1])
    assert (error["code"], error["param"]) == (400, "max_tokens")


async def test_an_answer_that_can_not_be_made_is_a_fault_of_the_service(
    service: Service, caplog: pytest.LogCaptureFixture
) -> None:
    service.script = [result("a", finish="stop")]
    # The Ingress drops null.
    status, text = await service.ask(RESPONSES, False, truncation=None)
    assert (status, error_of(text)["type"]) == (500, "internal_error")
    assert stacks(caplog) == [RuntimeError]
    assert "vLLM's application answered 400: 1 validation error" in caplog.text


def empty() -> None:
    raise VLLMValidationError("The decoder prompt cannot be empty")


@pytest.mark.parametrize("prompt", [["a", "", "b", ""], [[7], [], [8]]])
async def test_an_empty_text_of_a_list_is_named_by_its_index(service: Service, prompt: list[Any]) -> None:
    service.script = [empty]
    error = error_of((await service.ask(COMPLETIONS, False, prompt=prompt))[1])
    assert (error["param"], error["message"]) == ("prompt[1]", "prompt[1]: the text is empty")
