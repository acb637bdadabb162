"""vLLM's application behind the relay."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack

import pytest

from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.pooling_application import Application


@pytest.fixture
async def application() -> AsyncIterator[Application]:
    async with AsyncExitStack() as stack:
        yield await Application(DEMO_MODEL, ("embed",), convert="embed").start(stack)


async def test_only_the_routes_of_the_tasks_are_served(application: Application) -> None:
    assert "/v1/embeddings" in application.routes
    assert not {"/generate", "/v1/completions"} & application.routes


async def test_an_unknown_path_has_an_error_of_openai_s_shape(application: Application) -> None:
    status, body = await application.post("/v1/nothing")
    assert (status, body["error"]["code"]) == (404, 404)


async def test_the_middleware_that_the_ingress_replaces_is_left_out(application: Application) -> None:
    answer = await application.client.get("/v1/nothing", headers={"origin": "http://elsewhere"})
    # vLLM's own for other origins would set it.
    assert "vary" not in answer.headers
