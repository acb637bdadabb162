"""Wrong items of lists in requests to vLLM's application, of which one is enough."""

import asyncio
import json
import time
from collections.abc import Iterator
from typing import Any

import pytest
from fastapi import FastAPI
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.engine.vllm.validation import end_at_first_error
from serve_app.relay.asgi import run_app
from serve_app.relay.frame import KEEP_ALIVE, unpack
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage

ITEMS = 10_000
LIMIT_S = 2.0
"""Seconds of CPU; without the bound the cheapest of these takes several times as much."""

CHAT = {"messages": [{"role": "user", "content": "a"}]}
NOTHING: list[Any] = [{}] * ITEMS

WRONG: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": NOTHING}),
    ("/v1/responses", {"input": [1] * ITEMS}),
    ("/v1/responses", {"input": "a", "tools": NOTHING * 10}),
    ("/v1/chat/completions", {"messages": NOTHING * 10}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": [1] * 10 * ITEMS}, {}]}),
    ("/v1/chat/completions", CHAT | {"bad_words": [1] * 50 * ITEMS}),
    ("/v1/chat/completions", CHAT | {"vllm_xargs": {str(key): {} for key in range(50 * ITEMS)}}),
    ("/v1/chat/completions/batch", {"messages": [NOTHING] * 10}),
    ("/v1/completions", {"prompt": [*[1] * 50 * ITEMS, "a"]}),
    ("/v1/completions", {"prompt": [[1.5] * 50 * ITEMS]}),
    ("/v1/messages", {"max_tokens": 1, "messages": NOTHING * 10}),
    ("/detokenize", {"tokens": ["a"] * 50 * ITEMS}),
]
"""Requests with many wrong items; their bodies have 30 kB to 2 MB."""


@pytest.fixture(scope="module")
def app() -> Iterator[FastAPI]:
    before = ChatCompletionRequest.__pydantic_core_schema__, ChatCompletionRequest.__pydantic_validator__
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
    app.user_middleware = []
    end_at_first_error(app)
    app.middleware_stack = app.build_middleware_stack()
    yield app
    (
        ChatCompletionRequest.__pydantic_core_schema__,
        ChatCompletionRequest.__pydantic_validator__,
    ) = before


def dump(body: dict[str, Any]) -> bytes:
    return json.dumps({"model": "demo"} | body).encode()


async def post(app: FastAPI, path: str, content: bytes) -> tuple[int, str]:
    request = RelayRequest("POST", path, b"", [(b"content-type", b"application/json")], content)
    status, text = 0, b""
    async for message in run_app(app, request, usage=RequestUsage()):
        if message != KEEP_ALIVE:
            piece = unpack(message)
            status = piece.head.status if piece.head else status
            text += piece.body
    return status, text.decode()


@pytest.mark.parametrize(("path", "body"), WRONG, ids=lambda value: next(iter(value), "")[:20])
async def test_a_list_of_wrong_items_is_refused_at_once(
    app: FastAPI, path: str, body: dict[str, Any]
) -> None:
    content = dump(body)
    start = time.process_time()
    async with asyncio.timeout(60):
        status, text = await post(app, path, content)
    assert time.process_time() - start < LIMIT_S
    assert status == 400, text[:500]
    assert "validation error" in text


async def test_a_request_that_this_package_makes_is_bounded_as_well(app: FastAPI) -> None:
    start = time.process_time()
    with pytest.raises(ValueError, match="validation errors"):
        ChatCompletionRequest(messages=NOTHING * 10)
    assert time.process_time() - start < LIMIT_S


RIGHT: list[tuple[str, dict[str, Any]]] = [
    ("/v1/responses", {"input": [{"role": "user", "content": [{"type": "input_text", "text": "a"}]}] * 3}),
    ("/v1/chat/completions", CHAT | {"stop": ["a", "b"], "logit_bias": {"5": 1}}),
    ("/v1/completions", {"prompt": [[1, 2], [3]]}),
    ("/v1/completions", {"prompt": [1, 2]}),
    ("/v1/completions", {"prompt": ["a", "b"]}),
]


@pytest.mark.parametrize(("path", "body"), RIGHT)
async def test_right_items_pass_as_before(app: FastAPI, path: str, body: dict[str, Any]) -> None:
    # Behind the validation there is no model here.
    assert (await post(app, path, dump(body)))[0] == 500


def test_an_application_without_bodies_is_refused() -> None:
    with pytest.raises(RuntimeError, match="would not be bounded"):
        end_at_first_error(FastAPI())
