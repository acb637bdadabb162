"""A quota reserves no less than vLLM makes of the same body, however a client spells its length."""

import json
from io import BytesIO
from typing import Any

import pytest
from fastapi import UploadFile
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ValidationError
from vllm.entrypoints.anthropic.protocol import AnthropicMessagesRequest
from vllm.entrypoints.anthropic.serving import AnthropicServingMessages
from vllm.entrypoints.openai.chat_completion.protocol import BatchChatCompletionRequest, ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.entrypoints.serve.utils.api_utils import get_max_tokens
from vllm.entrypoints.speech_to_text.transcription.protocol import TranscriptionRequest
from vllm.exceptions import VLLMClientError

from serve_app.api.errors import RequestError
from serve_app.api.facts import LENGTHS
from serve_app.api.routes import CHAT_BATCH
from serve_app.settings.ingress import IngressSettings
from tests.serve_app.inspected import inspect

CONTEXT = 4096
PROMPT = 3
"""Tokens of the prompts."""

LIMITS = IngressSettings()
CHAT = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "a"}]
BODIES: dict[str, tuple[type[BaseModel], dict[str, Any]]] = {
    CHAT: (ChatCompletionRequest, {"messages": MESSAGES}),
    CHAT_BATCH: (BatchChatCompletionRequest, {"messages": [MESSAGES, MESSAGES]}),
    "/v1/completions": (CompletionRequest, {"prompt": ["a", "b"]}),
    "/v1/responses": (ResponsesRequest, {"input": "a"}),
    "/v1/messages": (AnthropicMessagesRequest, {"model": "m", "messages": MESSAGES, "max_tokens": 9}),
}

NAMES = (
    *("max_tokens", "max_completion_tokens", "max_output_tokens", "max_new_tokens", "max_length"),
    *("n", "best_of", "use_beam_search", "echo", "min_tokens", "truncate_prompt_tokens", "limit"),
)
NESTED = ("extra_body", "sampling_params", "vllm_xargs", "stream_options")
"""Objects in which vLLM might look for a length one day."""

NUMBER = st.integers(-2, 2 * CONTEXT)
SPELLED = st.one_of(
    NUMBER.map(str),
    st.sampled_from([0, 1, 7, 2000]).flatmap(
        lambda number: st.sampled_from(
            [f"{number}.0", f"{number}e0", f'"{number}"', f'" {number} "', f'"{number}.0"', f'"{number:08}"']
        )
    ),
    st.sampled_from(["null", "true", "false", "1.5", '"1_000"', '""', "[]", "{}", "1e3", "20E2", "-0"]),
)
"""Values as they stand in a body."""


@st.composite
def name(draw: st.DrawFn, among: tuple[str, ...] = NAMES) -> str:
    """Return a key as it stands in a body; one of its letters may be escaped."""
    name = draw(st.sampled_from(among))
    at = draw(st.integers(0, 2 * len(name)))
    if at < len(name):
        name = f"{name[:at]}\\u{ord(name[at]):04x}{name[at + 1 :]}"
    return f'"{name}"'


FIELD = st.tuples(name(), SPELLED).map(": ".join)
NEST = st.tuples(name(NESTED), st.lists(FIELD, max_size=2)).map(
    lambda nest: f"{nest[0]}: {{{', '.join(nest[1])}}}"
)
FIELDS = st.lists(FIELD | NEST, max_size=5)


def made(path: str, body: bytes) -> int | None:
    """Return the most tokens that vLLM takes for a body, its prompts included; None: it refuses the body."""
    kind, _ = BODIES[path]
    try:
        request: Any = kind.model_validate(json.loads(body))
        if path == "/v1/messages":
            request = AnthropicServingMessages.to_chat_completion_request(request)
        stated = request.max_tokens if path == "/v1/completions" else _stated(request)
        length = get_max_tokens(CONTEXT, stated, PROMPT, {})
        prompts = len(request.prompt) if path == "/v1/completions" else 1
        requests = [request]
        if path == CHAT_BATCH:
            requests = [request.to_chat_completion_request(each) for each in request.messages]
        total = 0
        for request in requests:
            # A response has no such field, and keeps what it doesn't know.
            if not isinstance(request, ResponsesRequest) and request.use_beam_search:
                beams = request.to_beam_search_params(length, {})
                total += prompts * (PROMPT + beams.beam_width * beams.max_tokens)
            else:
                params = request.to_sampling_params(length, {})
                total += prompts * (PROMPT + params.n * params.max_tokens)
    except (ValidationError, VLLMClientError, ValueError, TypeError):
        return None
    return total


def _stated(request: Any) -> int | None:
    """Return the length of an answer that a chat or a response states."""
    stated: int | None
    if isinstance(request, ResponsesRequest):
        stated = request.max_output_tokens
    elif (stated := request.max_completion_tokens) is None:
        stated = request.max_tokens
    return stated


def reserved(path: str, body: bytes) -> int | None:
    """Return the tokens that a quota reserves for a body; None: the Ingress refuses it."""
    try:
        return inspect(body, path, LIMITS).most(CONTEXT)
    except RequestError:
        return None


def text(path: str, fields: list[str]) -> bytes:
    """Return a body with fields behind those that the route needs."""
    base = json.dumps(BODIES[path][1]).removesuffix("}")
    return f"{', '.join([base, *fields])}}}".encode()


@pytest.mark.parametrize("path", BODIES)
@given(FIELDS)
@example(['"max_output_tokens": 1'])
# The temperature lets vLLM make several answers.
@example(['"max_output_tokens": 1', '"n": "16"', '"temperature": 1'])
@example(['"max_completion_tokens": null', '"max_tokens": 2000', '"max_output_tokens": 1'])
@example(['"max_tok\\u0065ns": 7', '"max_tokens": "2000"'])
@example(['"use_beam_search": true', '"n": 9.0'])
@example(['"echo": true', '"max_tokens": 0'])
def test_no_spelling_of_a_length_passes_a_quota(path: str, fields: list[str]) -> None:
    body = text(path, fields)
    most, found = made(path, body), reserved(path, body)
    if most is not None and found is not None:
        assert found >= most, body.decode()


@pytest.mark.parametrize("path", BODIES)
def test_the_length_that_a_route_reads_is_what_is_reserved(path: str) -> None:
    for name in LENGTHS[path]:
        body = text(path, [f'"{name}": 2000'])
        most, found = made(path, body), reserved(path, body)
        assert most is not None
        assert found is not None
        # The rest is what the template may add to the prompts.
        assert most <= found <= most + 2 * 600


def test_the_answers_of_a_form_are_reserved() -> None:
    values = {"n": " 4 ", "max_completion_tokens": "100", "use_beam_search": "1"}
    file = UploadFile(BytesIO(), filename="a.wav")
    request = TranscriptionRequest.model_validate({**values, "file": file})
    length = get_max_tokens(CONTEXT, request.max_completion_tokens, 0, {})
    assert request.to_beam_search_params(length, {}).beam_width == 4
    assert _of_form(values) >= 4 * length
    assert _of_form({"n": "4"}) == 4 * CONTEXT


def _of_form(values: dict[str, str]) -> int:
    parts = [
        f'--cut\r\ncontent-disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in values.items()
    ]
    body = "".join([*parts, "--cut--\r\n"]).encode()
    path = "/v1/audio/transcriptions"
    return inspect(body, path, LIMITS, content_type="multipart/form-data; boundary=cut").most(CONTEXT)
