"""vLLM's own OpenAI application, as it runs behind the relay.

The imports are those of vLLM 0.32.
"""

from collections.abc import Collection
from functools import partial
from typing import Any

import vllm
from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from prometheus_fastapi_instrumentator.middleware import PrometheusInstrumentatorMiddleware
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from vllm.entrypoints.generate.beam_search.online import BeamSearchOnlineMixin
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.serve.exception_handling.handlers.exception import exception_handler
from vllm.entrypoints.serve.exception_handling.handlers.http import http_exception_handler
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from serve_app.api.protocol import JSON
from serve_app.api.routes import GENERATE, MOVED, OPENAI, TOKENIZING
from serve_app.engine.tokenizing import TokenizingQueue
from serve_app.engine.vllm.client import GatedLLM
from serve_app.engine.vllm.pooling import bound_rendering, served_routes
from serve_app.engine.vllm.refusal import answer_faults
from serve_app.engine.vllm.validation import end_at_first_error

HOT = {"/v1/chat/completions", "/v1/completions"}
"""The most frequent routes."""

UNUSED: tuple[object, ...] = (CORSMiddleware, PrometheusInstrumentatorMiddleware)
"""Middleware of vLLM's application whose work the Ingress does, once for all models."""


async def build_application(llm: GatedLLM, args: Any, texts: TokenizingQueue) -> tuple[FastAPI, set[str]]:
    """Return vLLM's application of an engine, and the routes that it serves.

    Args:
        llm: The engine, which has started.
        args: The options of `vllm serve`.
        texts: Admits texts.
    """
    tasks = await llm.get_supported_tasks()
    app = build_app(args, tasks, llm.model_config)
    answer_faults()
    # vLLM gives its own errors OpenAI's shape, but not those of the router: no such path or method.
    app.exception_handler(HTTPException)(http_exception_handler)
    for kind in (EngineGenerateError, EngineDeadError):
        # vLLM's own handler of these ends the server that runs the application; here there is none.
        app.exception_handler(kind)(exception_handler)
    end_at_first_error(app)
    _drop_unused(app)
    app.middleware_stack = app.build_middleware_stack()
    await init_app_state(llm, app.state, args, tasks)
    for part in vars(app.state)["_state"].values():
        if isinstance(part, BeamSearchOnlineMixin):
            part.beam_search = partial(llm.beam_search, part.beam_search)
    bound_rendering(app.state, texts, llm.model_config.max_model_len)
    # vLLM looks up there what a request names.
    app.state.openai_serving_models.lora_requests = llm.adapters.requests
    return app, served_routes(app, tasks)


def describe_application(app: FastAPI, served: Collection[str]) -> JSON:
    """Return vLLM's version, and the OpenAPI document of those of its routes that clients may call.

    Args:
        app: Its application.
        served: The routes that the model serves; see `served_routes`.
    """
    public = {MOVED.get(path, path) for path in (*OPENAI, *TOKENIZING)} & set(served)
    routes = [route for route in app.router.routes if getattr(route, "path", "") in public]
    document = get_openapi(title="vLLM", version=vllm.__version__, openapi_version="3.1.0", routes=routes)
    for operations in document.get("paths", {}).values():
        for operation in operations.values():
            # vLLM answers a wrong field with a 400.
            operation["responses"].pop("422", None)
    return {"vllm": vllm.__version__, "generates": GENERATE in served, "openapi": document}


def _drop_unused(app: FastAPI) -> None:
    """Drop the middleware that has no use behind the relay, and put the most frequent routes first.

    The router tries one route after the other.
    """
    app.router.routes.sort(key=lambda route: getattr(route, "path", "") not in HOT)
    app.user_middleware = [each for each in app.user_middleware if each.cls not in UNUSED]
