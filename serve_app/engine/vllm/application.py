"""vLLM's own OpenAI application, as it runs behind the relay."""

import asyncio
import json
import logging
from collections.abc import Awaitable, Collection, Mapping
from contextlib import suppress
from typing import Any

import msgspec
from fastapi import FastAPI
from fastapi.exceptions import RequestValidationError
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from vllm.entrypoints.openai.responses.protocol import ResponsesRequest
from vllm.exceptions import GracefulHTTPError, VLLMClientError
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.api.errors import RequestError
from serve_app.api.routes import CLASSIFY, EMBEDDINGS, GENERATE, SCORE
from serve_app.api.validation import mistake
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.seams import build_app, exception_handler, http_exception_handler, init_app_state
from serve_app.engine.vllm.workarounds import run_beam_searches, score_beside_the_loop

RESPONSES = "/v1/responses"

PIECE = 32
"""Items of an `input` that are validated at once: in 75 ms if all are wrong, in 2 ms if all are right."""


class _Input(msgspec.Struct):
    """The field of `/v1/responses` with the items."""

    input: msgspec.Raw = msgspec.Raw(b"")


_INPUT, _ITEMS = msgspec.json.Decoder(_Input), msgspec.json.Decoder(list[msgspec.Raw])


class InputInPieces:
    """Middleware that validates a long `input` of `/v1/responses` in pieces, before vLLM does it at once.

    pydantic looks at all items of a list, and keeps an error for each alternative that an item is not: 10,000
    wrong items take it 23 s on the event loop, and gigabytes. A request with a wrong item goes on with the
    first piece that has one alone, which vLLM refuses in its own words.

    Args:
        app: The application behind it.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    def __call__(self, scope: Scope, receive: Receive, send: Send) -> Awaitable[None]:
        # Other routes have no further coroutine to pass with each piece.
        checked = scope["type"] == "http" and scope["path"] == RESPONSES
        return self._run(scope, receive, send) if checked else self._app(scope, receive, send)

    async def _run(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._app(scope, await self._checked(receive), send)

    async def _checked(self, receive: Receive) -> Receive:
        """Return what receives the same body, or the same with a wrong piece of its `input` alone."""
        body = b""
        while (message := await receive())["type"] == "http.request":
            body += message.get("body", b"")
            if not message.get("more_body", False):
                message = {"type": "http.request", "body": await _first_wrong(body)}
                break
        # A client that has left is the other message.
        messages = [message]

        async def again() -> Message:
            return messages.pop() if messages else await receive()

        return again


async def _first_wrong(body: bytes) -> bytes:
    with suppress(msgspec.MsgspecError, RecursionError):
        # Most bodies have few items, and are decoded once, by vLLM.
        text = _INPUT.decode(body).input
        if bytes(memoryview(text)[:1]) != b"[" or len(_ITEMS.decode(text)) <= PIECE:
            return body
    try:
        fields = json.loads(body)
    except (ValueError, RecursionError):
        return body
    items = fields.get("input") if isinstance(fields, dict) else None
    if not isinstance(items, list) or len(items) <= PIECE:
        return body
    for start in range(0, len(items), PIECE):
        piece = fields | {"input": items[start : start + PIECE]}
        try:
            ResponsesRequest.model_validate(piece)
        except Exception:
            # vLLM's own validation raises the same, and answers it.
            return json.dumps(piece).encode()
        await asyncio.sleep(0)
    return body


async def refuse_body(_: Request, error: Exception) -> Response:
    """Answer a body that vLLM's application can't validate: 400, with the field and the reason."""
    assert isinstance(error, RequestValidationError)
    param, errors = "", error.errors()
    if isinstance(errors[0], str):
        # vLLM's own check of the content type gives a sentence.
        message = errors[0]
    elif not isinstance(error.body, Mapping):
        message = "The body must be a JSON object"
    else:
        param, message = mistake([each | {"loc": each["loc"][1:]} for each in errors], error.body)
    refusal = RequestError(400, "invalid_request_error", message, param=param or None)
    return JSONResponse(refusal.body(), refusal.status)


async def refuse_value(_: Request, error: Exception) -> Response:
    """Answer an exception by which a validator of vLLM trips over a value of another type: 400.

    vLLM does so for ValueError, TypeError, OverflowError and NotImplementedError. Once the engine has run,
    such an answer counts as a fault of the service.
    """
    message = f"A value can't be read ({type(error).__name__}: {error})"
    refusal = RequestError(400, "invalid_request_error", message)
    return JSONResponse(refusal.body(), refusal.status)


def hide_refusals() -> None:
    """Keep vLLM from logging a stack trace of a refusal or a client's mistake: it does in each stream."""

    def shown(record: logging.LogRecord) -> bool:
        error = record.exc_info[1] if record.exc_info else None
        return not isinstance(error, VLLMClientError | GracefulHTTPError)

    for handler in logging.getLogger("vllm").handlers:
        handler.addFilter(shown)


HOT = {"/v1/chat/completions", "/v1/completions"}
"""The most frequent routes."""

UNUSED: tuple[object, ...] = (CORSMiddleware, PrometheusInstrumentatorMiddleware)
"""Middleware whose work the Ingress does, once for all models: each wraps every piece of an answer."""

SERVED_BY = {
    "serving_embedding": (EMBEDDINGS,),
    "serving_classification": CLASSIFY,
    "serving_scores": SCORE,
}
"""Parts of vLLM's application, and the routes that have no use without them."""


async def build_application(llm: GatedLLM, args: Any) -> tuple[FastAPI, set[str]]:
    """Return vLLM's application of an engine, and the routes that it serves.

    Args:
        llm: The engine, which has started.
        args: The options of `vllm serve`.
    """
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    # vLLM gives its own errors OpenAI's shape, but not those of the router: no such path or method.
    app.exception_handler(HTTPException)(http_exception_handler)
    app.exception_handler(RequestValidationError)(refuse_body)
    for kind in (AttributeError, LookupError, AssertionError, RecursionError):
        app.exception_handler(kind)(refuse_value)
    for kind in (EngineGenerateError, EngineDeadError):
        # vLLM's own handler of these ends the server that runs the application; here there is none.
        app.exception_handler(kind)(exception_handler)
    # The router tries one route after the other: the most frequent ones come first.
    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in HOT)
    app.user_middleware = [each for each in app.user_middleware if each.cls not in UNUSED]
    # vLLM has built one already.
    app.middleware_stack = None
    app.add_middleware(InputInPieces)
    await init_app_state(llm, app.state, args, tasks)
    run_beam_searches(app.state, llm.beam_search)
    score_beside_the_loop(app.state, llm.model_config.max_model_len)
    # vLLM looks up there what a request names.
    app.state.openai_serving_models.lora_requests = llm.adapters.requests
    return app, served_routes(app, tasks)


def served_routes(app: FastAPI, tasks: Collection[str]) -> set[str]:
    """Return the routes that a model serves, as vLLM names them, with `/generate` where it generates.

    vLLM's application has some that answer 501.

    Args:
        app: Its application, whose state is set.
        tasks: The tasks of the engine.
    """
    routes = {getattr(route, "path", "") for route in app.router.routes} - {GENERATE}
    for part, paths in SERVED_BY.items():
        if getattr(app.state, part, None) is None:
            routes -= set(paths)
    return routes | {GENERATE} if "generate" in tasks else routes
