"""The document of the live service: valid, with vLLM's own schemas, and each of its routes is served."""

import re
from collections.abc import Iterator

import httpx
import pytest
import schemathesis

from serve_app.api.protocol import JSON
from serve_app.api.routes import GENERATION, POOLING, SPEECH, TOKENIZING


@pytest.fixture(scope="module")
def document(http: httpx.Client) -> JSON:
    found: JSON = http.get("/openapi.json").json()
    return found


def test_the_document_is_valid(document: JSON) -> None:
    schemathesis.openapi.from_dict(document).validate()


def test_it_has_the_routes_that_the_models_serve(document: JSON) -> None:
    assert set(document["paths"]) >= {*GENERATION, *TOKENIZING, "/generate", "/process", "/v1/embeddings"}
    assert not set(document["paths"]) & ({*POOLING, *SPEECH} - {"/v1/embeddings"})


def test_vllm_s_routes_have_vllm_s_fields(document: JSON, vllm_app: JSON) -> None:
    own = vllm_app["openapi"]
    for path in GENERATION:
        operation = document["paths"][path]["post"]
        assert operation["requestBody"] == own["paths"][path]["post"]["requestBody"]
    schemas = document["components"]["schemas"]
    assert schemas["ChatCompletionRequest"] == own["components"]["schemas"]["ChatCompletionRequest"]


def bodies(document: JSON) -> Iterator[tuple[str, str]]:
    """Yield the method and the path of each operation."""
    for path, found in document["paths"].items():
        yield from ((method.upper(), path) for method in found)


def test_every_route_of_it_is_served(document: JSON, http: httpx.Client) -> None:
    for method, path in bodies(document):
        response = http.request(method, re.sub(r"{\w+}", "demo", path), json={})
        missing = response.status_code == 404 and response.json()["error"]["param"] != "id"
        assert response.status_code != 405, (method, path)
        assert not missing, (method, path, response.text)


def test_the_version_is_that_of_the_engine(http: httpx.Client) -> None:
    versions = http.get("/version").json()
    assert versions["version"] == versions["vllm"]
    assert re.fullmatch(r"0\.\d+\.\d+\S*", versions["version"])


def test_the_page_shows_the_fields(http: httpx.Client) -> None:
    page = http.get("/docs").text
    assert all(
        name in page for name in ("POST /v1/chat/completions", "max_completion_tokens", "service_tier")
    )
