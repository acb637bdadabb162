"""Makes the document of the API: `serve_app/ingress/openapi.json`, of which a service shows what it serves.

vLLM's part is made by vLLM's own application, anew only for another version of vLLM: it takes seconds.
"""

import json
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from serve_app.api.embeddings import EmbeddingRequest
from serve_app.api.protocol import JSON, GenerateRequest, GenerateResponse, ProcessRequest
from serve_app.api.routes import EMBEDDINGS, GENERATE, MOVED, OPENAI, PROCESS, TOKENIZING
from serve_app.ingress import admin, batches
from serve_app.ingress.api_document import DOCUMENT, FILE, PAGE, VERSION, used, vllm_version
from serve_app.stats import ServiceHealth, ServiceStats

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


def made() -> str:
    """Return the file."""
    version = vllm_version()
    before = json.loads(FILE.read_text()) if FILE.exists() else {}
    theirs = before["vllm"] if before.get("version") == version else vllm_part(_vllm_app())
    own = own_part()
    shared = own["schemas"].keys() & theirs["schemas"].keys()
    assert not shared, f"schemas of ours and of vLLM have the same names: {shared}"
    return json.dumps({"version": version, "own": own, "vllm": theirs}) + "\n"


def vllm_part(document: JSON) -> JSON:
    """Return vLLM's operations that clients reach, under each of their names, and their schemas.

    Args:
        document: The OpenAPI document of vLLM's application.
    """
    paths = {}
    for path in (*OPENAI, *TOKENIZING):
        operation = document["paths"][MOVED.get(path, path)]["post"] | {
            "operationId": _identifier("post", path)
        }
        # vLLM answers a wrong field with a 400.
        operation["responses"] = {
            status: answer for status, answer in operation["responses"].items() if status != "422"
        }
        paths[path] = {"post": operation}
    return {"paths": paths, "schemas": used(paths, document["components"]["schemas"])}


def _vllm_app() -> JSON:
    program = [sys.executable, "-m", "tests.e2e.vllm_app"]
    found: JSON = json.loads(subprocess.run(program, check=True, stdout=subprocess.PIPE).stdout)["openapi"]
    return found


def own_part() -> JSON:
    """Return the operations of our own routes, and the schemas that they refer to."""
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

    answer = refs[GenerateResponse, "serialization"]
    add("post", GENERATE, "Complete a list of prompts or chats.", body=body(GenerateRequest), answer=answer)
    add("post", PROCESS, "Run a function on a list of records.", body=body(ProcessRequest))
    add("post", EMBEDDINGS, "Embed texts.", body=body(EmbeddingRequest))
    add("get", "/v1/models", "The models and adapters that the key may use.")
    add("get", "/v1/models/{model}", "A model or an adapter.")
    text = "an adapter on every replica of its model."
    add("post", admin.LOAD, f"Load {text}", body=body(admin.LoadBody))
    add("post", admin.UNLOAD, f"Unload {text}", body=body(admin.UnloadBody))
    add("get", admin.KEYS, "All API keys; for an administrator.")
    add("get", admin.USAGE, "Who used what; for an administrator.", query=admin.FIELDS)
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
    return {"paths": paths, "schemas": definitions.get("$defs", {}) | {"Error": ERROR}}
