"""vLLM's application behind the relay."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest
import vllm

from serve_app.engine.vllm.application import describe_application
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.pooling_application import Application


@pytest.fixture
async def application() -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        yield await Application(DEMO_MODEL, ("embed",), convert="embed").start(stack)


async def test_only_the_routes_of_the_tasks_are_served(application: Application) -> None:
    assert "/v1/embeddings" in application.routes
    assert not {"/generate", "/v1/completions"} & application.routes


async def test_its_description_has_the_routes_that_clients_may_call(application: Application) -> None:
    found = describe_application(application.app, application.routes)
    assert (found["vllm"], found["generates"]) == (vllm.__version__, False)
    scores = {"/score", "/v1/score", "/rerank", "/v1/rerank", "/v2/rerank"}
    document = found["openapi"]
    assert set(document["paths"]) == {"/v1/embeddings", "/tokenize", "/detokenize", *scores}
    assert "input" in document["components"]["schemas"]["EmbeddingCompletionRequest"]["properties"]
    statuses = {status for path in document["paths"].values() for status in path["post"]["responses"]}
    assert "422" not in statuses


async def test_an_unknown_path_has_an_error_of_openai_s_shape(application: Application) -> None:
    status, body = await application.post("/v1/nothing")
    assert (status, body["error"]["code"]) == (404, 404)


async def test_the_middleware_that_the_ingress_replaces_is_left_out(application: Application) -> None:
    answer = await application.client.get("/v1/nothing", headers={"origin": "http://elsewhere"})
    # vLLM's own for other origins would set it.
    assert "vary" not in answer.headers
