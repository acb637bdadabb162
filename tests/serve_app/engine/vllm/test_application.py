"""vLLM's application behind the relay."""

import asyncio
import json
import logging
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from http import HTTPStatus
from typing import Any

import httpx
import pytest
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.launchers.cli_args import make_arg_parser
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.exceptions import GracefulHTTPError, VLLMValidationError
from vllm.utils.argparse_utils import FlexibleArgumentParser

from serve_app.engine.vllm.application import InputInPieces, hide_refusals
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.pooling_application import LIMIT_S, Application

RESPONSES = "/v1/responses"
JSON_TYPE = {"content-type": "application/json"}


@pytest.fixture
async def application() -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        yield await Application(DEMO_MODEL, ("embed",), convert="embed").start(stack)


async def test_only_the_routes_of_the_tasks_are_served(application: Application) -> None:
    assert "/v1/embeddings" in application.routes
    assert not {"/generate", "/v1/completions"} & application.routes


def test_vllm_logs_no_stack_trace_of_what_is_no_fault() -> None:
    logged: list[logging.LogRecord] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            logged.append(record)

    handler = Kept()
    logger = logging.getLogger("vllm")
    logger.addHandler(handler)
    try:
        hide_refusals()
        full = GracefulHTTPError("full", HTTPStatus.TOO_MANY_REQUESTS)
        for error in (full, VLLMValidationError("too hot"), KeyError("broken")):
            try:
                raise error
            except Exception:
                logging.getLogger("vllm.entrypoints").exception("Error in a stream.")
    finally:
        logger.removeHandler(handler)
    assert [record.exc_info[0] for record in logged if record.exc_info] == [KeyError]


async def test_an_unknown_path_has_an_error_of_openai_s_shape(application: Application) -> None:
    status, body = await application.post("/v1/nothing")
    assert (status, body["error"]["code"]) == (404, 404)


def post(app: Any, path: str, body: Any) -> tuple[int, Any, float]:
    """Return the status and the message of an answer, and the longest time that it held the event loop."""

    async def measured() -> tuple[int, Any, float]:
        longest, ended = 0.0, False

        async def watch() -> None:
            nonlocal longest
            while not ended:
                began = time.process_time()
                await asyncio.sleep(0)
                longest = max(longest, time.process_time() - began)

        transport = httpx.ASGITransport(app=app)
        async with httpx.AsyncClient(transport=transport, base_url="http://x", timeout=LIMIT_S) as client:
            watching = asyncio.create_task(watch())
            answer = await client.post(path, content=json.dumps(body).encode(), headers=JSON_TYPE)
            ended = True
            await watching
        return answer.status_code, answer.json()["error"]["message"], longest

    return asyncio.run(measured())


@pytest.fixture(scope="module")
def generating() -> Any:
    app = build_app(make_arg_parser(FlexibleArgumentParser()).parse_args([]), ("generate",))
    app.middleware_stack = None
    app.add_middleware(InputInPieces)
    app.exception_handler(AttributeError)(exception_handler)
    return app


GOOD = {"role": "user", "content": [{"type": "input_text", "text": "a"}]}


@pytest.mark.parametrize("wrong", [{}, 1, {"role": "user"}, {"type": "message"}, {"type": "nothing"}])
@pytest.mark.parametrize("before", [0, 500])
def test_an_input_of_wrong_items_holds_the_event_loop_for_a_moment_only(
    generating: Any, wrong: Any, before: int
) -> None:
    body = {"model": "demo", "input": [*[GOOD] * before, *[wrong] * 10_000]}
    status, message, longest = post(generating, RESPONSES, body)
    assert status == 400
    assert "validation errors" in message
    assert longest < 1.0


@pytest.mark.parametrize("items", [[GOOD] * 3, [GOOD] * 1_000, [GOOD] * 1_001])
def test_a_right_input_passes_as_it_came(generating: Any, items: Any) -> None:
    # Behind the validation there is no model here.
    assert post(generating, RESPONSES, {"model": "demo", "input": items})[0] == 500


@pytest.mark.parametrize("body", [b"", b"{", b"[1]", b'{"input": 1}', b"[" * 100_000], ids=len)
async def test_a_body_that_is_no_request_passes_as_it_came(body: bytes) -> None:
    heard: list[bytes] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        heard.append((await receive())["body"])
        assert (await receive())["type"] == "http.disconnect"

    messages = [
        {"type": "http.request", "body": body[:1], "more_body": True},
        {"type": "http.request", "body": body[1:]},
        {"type": "http.disconnect"},
    ]

    async def receive() -> Any:
        return messages.pop(0)

    async def send(message: Any) -> None:
        raise AssertionError(message)

    await InputInPieces(app)({"type": "http", "path": RESPONSES}, receive, send)
    assert heard == [body]
