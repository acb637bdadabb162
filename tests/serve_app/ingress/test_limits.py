"""Limits on one request, and on the time that its body may take."""

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any

import httpx
import pytest

from serve_app.api.routes import CHAT_BATCH
from serve_app.auth.keys import hash_key
from serve_app.ingress.deployment import Ingress
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.schema import parse
from tests.serve_app.ingress.engine_doubles import (
    CHAT,
    LIMIT_S,
    Client,
    Engine,
    answer,
    check_error,
    echo,
    health,
)
from tests.serve_app.inspected import inspect

__all__ = ["health"]

PROMPT = {"prompt": "x"}


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        (CHAT, {"n": 3}, "n"),
        (CHAT, {"n": "3"}, "n"),
        (CHAT, {"n": 3.0}, "n"),
        ("/v1/completions", {"best_of": 3}, "best_of"),
        (CHAT, {"max_tokens": 11}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 11}, "max_completion_tokens"),
        ("/v1/responses", {"max_output_tokens": 11}, "max_output_tokens"),
        ("/v1/completions", {"prompt": ["x"] * 4}, "prompt"),
        ("/v1/completions", {"prompt": [[1]] * 4}, "prompt"),
        ("/v1/embeddings", {"input": ["x"] * 4}, "input"),
        ("/v1/rerank", {"documents": ["x"] * 4}, "documents"),
        ("/v1/score", {"text_2": ["x"] * 4}, "text_2"),
        ("/v1/score", {"queries": "x", "items": ["x"] * 4}, "items"),
        ("/v1/rerank", {"documents": {"content": [{"text": "x"}] * 12}}, "documents"),
        ("/v1/completions", {"prompt_embeds": ["x"] * 4}, "prompt_embeds"),
        (CHAT_BATCH, {"messages": [[]] * 4}, "messages"),
        ("/v1/embeddings", {"messages": [[]] * 4}, "messages"),
        ("/v1/classify", {"input": ["x"] * 4}, "input"),
        ("/v2/rerank", {"documents": ["x"] * 4}, "documents"),
        (CHAT, {"messages": [{"content": "x"}] * 13}, "messages"),
        (CHAT, {"messages": [{"content": [{"text": "x"}] * 6}] * 2}, "messages"),
        (CHAT_BATCH, {"messages": [[{"content": "x"}] * 7] * 2}, "messages"),
        ("/v1/responses", {"input": [{"content": [{"text": "x"}] * 12}]}, "input"),
        (CHAT, {"tools": [{"function": {}}] * 13}, "tools"),
        (CHAT, {"messages": json.loads("[" * 500 + "{}, " * 12 + "{}" + "]" * 500)}, "messages"),
        ("/generate", {"prompts": ["x"], "max_tokens": 11}, "max_tokens"),
        ("/generate", {"prompts": ["x"] * 4}, "prompts"),
        ("/generate", {"messages": [[{"content": "x"}] * 7] * 2}, "messages"),
        ("/generate", {"messages": [[{"content": [{"text": "x"}] * 12}]]}, "messages"),
        (CHAT, {"metadata": {str(key): key for key in range(2000)}}, "metadata"),
        ("/generate", {"prompts": [{}] * 2000}, "prompts"),
        ("/process", {"records": [[{}] * 2000]}, None),
    ],
)
async def test_more_than_the_limit_is_refused_with_the_field(
    path: str, body: object, param: str | None
) -> None:
    async with Client(max_n=2, max_tokens=10, max_prompts=3, max_messages=12, max_values=1000) as client:
        message = check_error(await client.post(path, json=body), 400, "invalid_request_error", param)
        assert message.startswith(f"{param}: " if param else "The body has more than 1000 values")
        assert client.engine.requests == []


async def test_a_body_without_a_type_has_the_same_limits() -> None:
    # vLLM's application may take it for JSON.
    async with Client(max_n=2) as client:
        for headers in ({}, {"content-type": ""}):
            response = await client.post(CHAT, content=b'{"n": 3}', headers=headers)
            check_error(response, 400, "invalid_request_error", "n")


async def test_the_last_of_two_fields_with_one_name_counts_as_it_does_for_vllm() -> None:
    async with Client(max_n=2) as client:
        content = b'{"n": 1, "n": 1000}'
        assert json.loads(content) == {"n": 1000}
        check_error(await client.post(CHAT, content=content), 400, "invalid_request_error", "n")


@pytest.mark.parametrize(
    ("path", "body"),
    [
        (CHAT, {"n": 2, "max_tokens": 10}),
        (CHAT, {"n": None, "max_completion_tokens": None}),
        # One prompt, in tokens.
        ("/v1/completions", {"prompt": list(range(100))}),
        ("/v1/completions", {"prompt": ["x"] * 3}),
        ("/generate", {"prompts": ["x"] * 3, "max_tokens": 10}),
        # One chat of many messages.
        (CHAT, {"messages": [{"role": "user"}] * 9}),
        ("/generate", {"messages": [[{"role": "user"}] * 4] * 3}),
        # Many objects, but few messages.
        (
            CHAT,
            {"messages": [{"role": "user", "content": each} for each in ("{" * 50, [{"text": "{" * 50}])]},
        ),
        (CHAT, {"tools": [{"function": {"parameters": {"a": [{}] * 50}}}]}),
    ],
)
async def test_a_request_within_the_limits_goes_through(path: str, body: object) -> None:
    async with Client(max_n=2, max_tokens=10, max_prompts=3, max_messages=12, max_values=1000) as client:
        assert (await client.post(path, json=body)).status_code == 200


@pytest.mark.parametrize("path", [CHAT, "/v1/embeddings", "/v1/audio/transcriptions"])
@pytest.mark.parametrize("type", ["text/plain", "multipart/form-data; boundary=cut"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-16", "utf-32-be"])
async def test_a_body_of_no_type_that_its_route_reads_is_refused(path: str, type: str, encoding: str) -> None:
    body = json.dumps({"tools": [[]] * 2000}).encode(encoding)
    async with Client(max_values=1000) as client:
        response = await client.post(path, content=body, headers={"content-type": type})
        param = response.json()["error"]["param"]
        assert param in ("content-type", None)
        check_error(response, 400, "invalid_request_error", param)
        assert client.engine.requests == []


async def test_a_form_has_no_bound_on_the_values_of_its_files() -> None:
    async with Client(max_values=1000) as client:
        files = {"file": ("a.wav", b"[],\0" * 2000, "audio/wav")}
        assert (await client.post("/v1/audio/transcriptions", files=files)).status_code == 200


async def test_a_body_that_does_not_come_is_given_up() -> None:
    async def body() -> AsyncGenerator[bytes, None]:
        yield b"{"
        await asyncio.Event().wait()

    async with Client(body_timeout_s=0.05) as client:
        message = check_error(await client.post(CHAT, content=body()), 408, "timeout_error")
        assert message == "The body was not here after 0.05 s (ingress.body_timeout_s)"


# With keys


KEY = "sk-ada"


@pytest.fixture
def guarded(monkeypatch: pytest.MonkeyPatch) -> tuple[httpx.AsyncClient, Engine]:
    """A client of an Ingress that asks for keys, and the engine behind it."""
    ada = {
        "name": "ada",
        "sha256": hash_key(KEY.encode()),
        "tenant": "research",
        "tiers": ["default", "flex"],
    }
    monkeypatch.setenv("KEYS", json.dumps([ada]))
    engine = Engine(echo)
    settings = parse({"models": [{"id": "demo", "source": "x"}], "access": {"keys_env": "KEYS"}})
    engines: Any = {"demo": engine}
    app = Ingress(settings, engines).__serve_build_asgi_app__()
    transport = httpx.ASGITransport(app)
    return httpx.AsyncClient(transport=transport, base_url="http://saturate", timeout=LIMIT_S), engine


async def test_no_route_but_those_about_the_service_answers_without_a_key(
    guarded: tuple[httpx.AsyncClient, Engine],
) -> None:
    client, engine = guarded
    app: Any = client._transport
    paths = {route.path for route in app.app.routes}
    assert {"/stats", "/generate", "/process", "/v1/models", CHAT, "/tokenize"} < paths
    open = {
        "/health",
        "/ping",
        "/version",
        "/openapi.json",
        "/docs",
        "/",
        "/page.css",
        "/page.js",
        "/stats.html",
    }
    assert open < paths
    for path in paths - open:
        for method in ("GET", "POST"):
            response = await client.request(method, path, json={})
            assert response.status_code == 401
            assert response.json()["error"]["type"] == "authentication_error"
    assert engine.requests == []


async def test_a_key_decides_tenant_and_tiers_and_goes_no_further(
    guarded: tuple[httpx.AsyncClient, Engine],
) -> None:
    client, engine = guarded
    client.headers["authorization"] = f"Bearer {KEY}"
    for path, body in ((CHAT, {}), ("/generate", {"prompts": ["x" * 4_000]})):
        assert (await client.post(path, json=body | {"service_tier": "flex"})).status_code == 200
        check_error(
            await client.post(path, json=body | {"service_tier": "fast"}),
            403,
            "permission_error",
            "service_tier",
        )
        check_error(
            await client.post(path, json=body, headers={"x-tenant": "b"}), 403, "permission_error", "tenant"
        )
    assert [(request.scheduling.tenant, request.scheduling.priority) for request in engine.requests] == [
        ("research", 1)
    ] * 2
    # The replica is chosen by prompts of the tenant alone.
    long = engine.requests[-1]
    stated = inspect(long.body, "/generate", IngressSettings())
    assert stated.prefix
    assert long.facts.prefix == stated.cached_for("", "research").prefix
    assert KEY.encode() not in b"".join(value for request in engine.requests for _, value in request.headers)


@pytest.mark.parametrize(
    ("path", "body"),
    [(CHAT, {"messages": []}), ("/generate", {"prompts": ["x"]}), ("/tokenize", {"prompt": "x"})],
)
async def test_a_key_for_some_models_sees_and_uses_these_only(
    monkeypatch: pytest.MonkeyPatch, path: str, body: dict[str, Any]
) -> None:
    ada = {"name": "ada", "sha256": hash_key(KEY.encode()), "tenant": "research", "models": ["b", "gone"]}
    monkeypatch.setenv("KEYS", json.dumps([ada]))
    engines: Any = {name: Engine(echo) for name in ("a", "b", "c")}
    models = [{"id": name, "source": "x"} for name in engines]
    settings = parse({"models": models, "access": {"keys_env": "KEYS"}})
    transport = httpx.ASGITransport(Ingress(settings, engines).__serve_build_asgi_app__())
    headers = {"authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(transport=transport, base_url="http://saturate", headers=headers) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        assert [model["id"] for model in listed] == ["b"]
        assert (await client.get("/v1/models/b")).json()["id"] == "b"
        check_error(await client.get("/v1/models/a"), 404, "not_found_error", "model")
        assert list((await client.get("/stats")).json()["models"]) == ["b"]
        for model in ("a", "nothing"):
            message = check_error(
                await client.post(path, json=body | {"model": model}), 404, "not_found_error", "model"
            )
            assert message.endswith("it has access to: b")
        assert (await client.post(path, json=body | {"model": "b"})).status_code == 200
        # It need not be named: there is no other one to this key.
        assert (await client.post(path, json=body)).status_code == 200
    assert [len(engine.requests) for engine in engines.values()] == [0, 2, 0]


async def test_an_open_ingress_warns_of_it(
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    guarded: tuple[httpx.AsyncClient, Engine],
) -> None:
    monkeypatch.setattr("serve_app.auth.bind_check.serve_host", lambda: "0.0.0.0")
    assert caplog.records == []
    async with Client(Engine(answer())):
        (record,) = caplog.records
    assert (record.levelname, "asks for no API key" in record.getMessage()) == ("WARNING", True)
