"""The OpenAPI document of the routes that are served, its page, and the versions."""

import base64
import copy
import hashlib
import importlib.metadata
import json
import re
from pathlib import Path
from typing import Any

import httpx
import pytest
import ray
import schemathesis
import yaml
from starlette.routing import Route

from serve_app.api.protocol import JSON, GenerateRequest
from serve_app.api.routes import GENERATION, MOVED, OPENAI, POOLING, SPEECH, TOKENIZING
from serve_app.auth.keys import hash_key
from serve_app.ingress.api_document import RETRY_S, APIDocument
from serve_app.ingress.batches import ROUTES
from serve_app.ingress.deployment import NOT_STORED, Ingress
from serve_app.ingress.pages import FILES
from serve_app.ingress.status import ModelState
from serve_app.jobs.routes import BatchAPI
from serve_app.settings.schema import parse
from tests.pages import read
from tests.serve_app.ingress.engine_doubles import Engine, check_error, echo, health
from tests.serve_app.ingress.test_pages import Reader

__all__ = ["health"]

KEY = "sk-root"
LIMIT_S = 20.0
OF_PAGE = {*FILES, "/stats.html"} - {"/"}
"""Routes for browsers: the parts of the page, which the document leaves out."""

VLLM = {MOVED.get(path, path) for path in (*OPENAI, *TOKENIZING)}
"""Routes of vLLM's application that clients reach, as vLLM names them."""


def description(*paths: str, generates: bool = True, **fields: Any) -> JSON:
    """Return an Engine's description of vLLM's application."""
    body = {"$ref": "#/components/schemas/Body"}
    operation = {
        "summary": "of vLLM",
        "requestBody": {"content": {"application/json": {"schema": body}}},
        "responses": {"200": {"description": "Successful Response"}},
    }
    schema = {"type": "object", "properties": fields or {"mine": {"type": "string"}}}
    return {
        "vllm": "0.32.7",
        "generates": generates,
        "openapi": {
            "paths": {path: {"post": operation | {"operationId": path}} for path in paths or VLLM},
            "components": {"schemas": {"Body": schema}},
        },
    }


class Telling(Engine):
    """The handle of an Engine that describes its application.

    Attributes:
        description: The description; an exception is raised.
        asked_for_it: How often it was asked.
    """

    def __init__(self, description: JSON | Exception) -> None:
        super().__init__(echo)
        self.description = description
        self.asked_for_it = 0

    def options(self, **options: Any) -> Any:
        return Question(self) if options.get("method_name") == "describe" else super().options(**options)


class Question:
    """The handle's method `describe`."""

    def __init__(self, engine: Telling) -> None:
        self._engine = engine

    async def remote(self) -> JSON:
        self._engine.asked_for_it += 1
        if isinstance(self._engine.description, Exception):
            raise self._engine.description
        return copy.deepcopy(self._engine.description)


class Site:
    """An Ingress in front of Engines that describe themselves.

    Attributes:
        app: Its application.
        http: A client.
    """

    def __init__(self, engines: dict[str, Telling], health: dict[str, ModelState], **settings: Any) -> None:
        models = [{"id": name, "source": "x", **settings.pop(name, {})} for name in engines]
        models += settings.pop("functions", [])
        health |= {model["id"]: ModelState(1, asleep=False, awaits="") for model in models}
        handles: Any = engines | {model["id"]: Engine(echo) for model in models if "target" in model}
        batches: Any = Engine(echo) if "batches" in settings else None
        self.app = Ingress(parse({"models": models, **settings}), handles, batches).__serve_build_asgi_app__()
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
        {"demo": Telling(description())},
        health,
        demo={"adapters_folder": "/shared"},
        functions=[{"id": "embed", "kind": "function", "target": "a:B", "embeddings": True}],
        access={"keys_file": str(folder / "keys.yaml")},
        batches={"folder": str(folder / "b")},
        usage={"ledger": {"folder": str(folder / "u")}},
    )
    site.http.headers["authorization"] = f"Bearer {KEY}"
    return site


def served(site: Site) -> set[tuple[str, str]]:
    """Return the methods and paths that an application serves."""
    unserved = {"/metrics", *NOT_STORED, *OF_PAGE}
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
    assert operations(document) == served(site)
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
    assert named - {path for _, path in documented} == OF_PAGE


def test_the_routes_of_files_and_batches_are_those_of_their_deployment() -> None:
    nothing: Any = None
    found: Any = BatchAPI(nothing, nothing, lambda: None, limits=nothing).app().routes
    there = {(method, route.path) for route in found for method in (route.methods or set()) - {"HEAD"}}
    assert {(method, path) for path, methods in ROUTES.items() for method in methods} == there


async def test_a_plain_service_has_no_routes_of_what_is_off(health: dict[str, ModelState]) -> None:
    site = Site({"demo": Telling(description(*GENERATION, "/tokenize", "/detokenize"))}, health)
    document = await site.document()
    paths = set(document["paths"])
    assert paths >= {*GENERATION, *TOKENIZING, "/generate", "/v1/models", "/health", "/ping", "/version"}
    assert not paths & {*POOLING, *SPEECH, "/process", "/v1/files", "/v1/batches", "/v1/load_lora_adapter"}
    assert not any(path.startswith("/v1/admin") for path in paths)
    assert "security" not in document


async def test_vllm_s_routes_have_vllm_s_schema_and_ours_have_ours(health: dict[str, ModelState]) -> None:
    site = Site({"demo": Telling(description())}, health)
    document = await site.document()
    for path in (*OPENAI, *TOKENIZING):
        assert document["paths"][path]["post"]["summary"] == "of vLLM"
    schemas = document["components"]["schemas"]
    assert set(schemas["Body"]["properties"]) == {"mine"}
    assert set(schemas["GenerateRequest"]["properties"]) == set(GenerateRequest.model_fields)
    ids = [operation["operationId"] for found in document["paths"].values() for operation in found.values()]
    assert len(ids) == len(set(ids))


async def test_schemas_of_two_models_that_differ_have_two_names(health: dict[str, ModelState]) -> None:
    one = Telling(description("/v1/completions"))
    other = Telling(description("/v1/embeddings", generates=False, yours={"type": "integer"}))
    document = await Site({"a": one, "b": other}, health).document()

    def fields(path: str) -> set[str]:
        body = document["paths"][path]["post"]["requestBody"]["content"]["application/json"]["schema"]
        return set(document["components"]["schemas"][body["$ref"].rpartition("/")[2]]["properties"])

    assert (fields("/v1/completions"), fields("/v1/embeddings")) == ({"mine"}, {"yours"})


async def test_a_model_that_has_not_started_hides_no_schema_of_one_that_has(
    health: dict[str, ModelState],
) -> None:
    engines = {"a": Telling(ConnectionError("gone")), "b": Telling(description("/v1/completions"))}
    paths = (await Site(engines, health).document())["paths"]
    assert paths["/v1/completions"]["post"]["summary"] == "of vLLM"
    assert "has not started" in paths["/v1/chat/completions"]["post"]["summary"]


async def test_a_model_that_pools_has_no_generate(health: dict[str, ModelState]) -> None:
    engine = Telling(description("/v1/embeddings", generates=False))
    assert "/generate" not in (await Site({"a": engine}, health).document())["paths"]


async def test_an_engine_is_asked_once_and_a_model_that_sleeps_is_not_started(
    health: dict[str, ModelState],
) -> None:
    now = 0.0
    engine = Telling(description("/v1/completions"))
    settings = parse({"models": [{"id": "demo", "source": "x"}]})
    there = 0

    async def running(model: str) -> int:
        return there

    document = APIDocument(settings, {"demo": engine}, running, lambda: now)
    before = json.loads(await document.text(""))
    assert engine.asked_for_it == 0
    assert set(before["paths"]) >= {*GENERATION, *TOKENIZING, "/generate"}
    assert "has not started" in before["paths"]["/v1/completions"]["post"]["summary"]
    there = 1
    # Not asked again at once.
    assert json.loads(await document.text("")) == before
    now += RETRY_S
    after = json.loads(await document.text(""))
    assert after["paths"]["/v1/completions"]["post"]["summary"] == "of vLLM"
    assert not {"/v1/chat/completions", "/v1/responses"} & set(after["paths"])
    for _ in range(3):
        now += RETRY_S
        await document.text("")
        await document.page("")
        await document.versions()
    assert engine.asked_for_it == 1


async def test_an_engine_that_does_not_answer_is_asked_again_later(health: dict[str, ModelState]) -> None:
    site = Site({"demo": Telling(ConnectionError("gone"))}, health)
    assert "/v1/completions" in (await site.document())["paths"]
    assert (await site.http.get("/version")).status_code == 200


async def test_versions(health: dict[str, ModelState]) -> None:
    site = Site({"demo": Telling(description())}, health)
    assert (await site.http.get("/version")).json() == {
        # As vLLM answers.
        "version": "0.32.7",
        "vllm": "0.32.7",
        "saturate": importlib.metadata.version("saturate"),
        "ray": ray.__version__,
    }


@pytest.mark.parametrize("method", ["GET", "POST"])
async def test_ping_is_health(health: dict[str, ModelState], method: str) -> None:
    site = Site({"demo": Telling(description())}, health)
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
    assert "mine" in part
    assert all(name in reader.text for name in GenerateRequest.model_fields)


async def test_a_prefix_is_told(health: dict[str, ModelState]) -> None:
    site = Site({"demo": Telling(description())}, health)
    transport = httpx.ASGITransport(site.app, root_path="/guarded")
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate") as http:
        document = (await http.get("/guarded/openapi.json")).json()
    assert document["servers"] == [{"url": "/guarded"}]


# Paths


@pytest.mark.parametrize("path", ["/v1/models/", "/v1/models//", "/v1/models/demo/", "/health/", "/stats/"])
async def test_a_slash_at_the_end_changes_nothing(health: dict[str, ModelState], path: str) -> None:
    site = Site({"demo": Telling(description())}, health)
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
    site = Site({"demo": Telling(description())}, health)
    message = check_error(await site.http.request(method, path), 404, "not_found_error", "store")
    assert "not stored" in message
