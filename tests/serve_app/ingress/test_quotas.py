"""Quotas in front of engines that the test plays: reservations, refusals and headers of requests."""

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from pathlib import Path
from typing import Any, cast

import httpx
import pytest
from ray.serve.handle import DeploymentHandle

from serve_app.ingress import models
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.status import ModelHealth
from serve_app.relay.frame import pack
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage
from serve_app.settings.schema import SettingsError, parse
from tests.serve_app.answers import END
from tests.serve_app.ingress.engine_doubles import (
    CHAT,
    LIMIT_S,
    PLAIN,
    STREAM,
    Call,
    Engine,
    Waking,
    answer,
    health,
)
from tests.serve_app.quotas.fleet import QuotasHandle

__all__ = ["health"]

SECRET = "sk-ada"
BODY = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 100}
SIZE = 512 + 100 + len(json.dumps(BODY, separators=(",", ":")))
"""About the tokens that the body reserves."""


Site = Callable[..., tuple[httpx.AsyncClient, QuotasHandle, Ingress]]


@pytest.fixture
def site(tmp_path: Path) -> Site:
    """Returns a client of an Ingress with one key, its quotas and its application."""

    def build(
        engine: Engine,
        key: dict[str, Any] | None = None,
        context: int | None = 4096,
        **tenants: dict[str, int],
    ) -> tuple[httpx.AsyncClient, QuotasHandle, Ingress]:
        entry = {"name": "ada", "sha256": hashlib.sha256(SECRET.encode()).hexdigest(), "tenant": "research"}
        keys = tmp_path / "keys.yaml"
        keys.write_text(json.dumps([entry | ({"quota": key} if key else {})]))
        settings = parse(
            {
                "models": [{"id": "demo", "source": "x", "engine": {"max_model_len": context}}],
                "access": {"keys_file": str(keys)},
                "usage": {"quotas": {"tenants": tenants, "folder": str(tmp_path)}},
            }
        )
        assert settings.usage.quotas is not None
        handle = QuotasHandle(settings.usage.quotas)
        ingress = Ingress(
            settings,
            cast(dict[str, DeploymentHandle[Any]], {"demo": engine}),
            quotas=handle,
        )
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(ingress.__serve_build_asgi_app__()),
            base_url="http://saturate:8000",
            timeout=LIMIT_S,
            headers={"authorization": f"Bearer {SECRET}"},
        )
        return client, handle, ingress

    return build


def used(prompt: int, output: int) -> Engine:
    """Return an engine whose answers have taken these tokens."""
    usage = RequestUsage(prompt_tokens=prompt, output_tokens=output)
    return Engine(answer(pack(head=PLAIN, body=b"{}", usage=usage)))


async def test_a_request_gives_back_what_it_did_not_use(site: Site) -> None:
    client, quotas, _ = site(used(10, 20), research={"tokens_per_day": 10_000})
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 200
    headers = response.headers
    assert headers["x-ratelimit-limit-tokens"] == "10000"
    assert 10_000 - SIZE - 50 < int(headers["x-ratelimit-remaining-tokens"]) <= 10_000 - SIZE + 50
    assert headers["x-ratelimit-reset-tokens"].endswith("s")
    assert await quotas.left("tenant research", "tokens_per_day") == 9_970


async def test_a_refusal_is_429_with_the_limit_and_openai_s_headers(site: Site) -> None:
    client, _, _ = site(used(10, 20), {"requests_per_minute": 2}, research={"tokens_per_day": 10_000})
    for _ in range(2):
        assert (await client.post(CHAT, json=BODY)).status_code == 200
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 429
    error = response.json()["error"]
    assert error["message"].startswith("key ada: requests_per_minute 2: ")
    assert 50 <= int(response.headers["retry-after"]) <= 60
    assert response.headers["x-ratelimit-limit-requests"] == "2"
    assert response.headers["x-ratelimit-remaining-requests"] == "0"
    assert response.headers["x-ratelimit-limit-tokens"] == "10000"


async def test_a_request_that_never_fits_is_told_by_which_limit(site: Site) -> None:
    client, _, _ = site(used(1, 1), research={"tokens_per_minute": 300})
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 400
    assert "tenant research: tokens_per_minute 300" in response.json()["error"]["message"]


@pytest.mark.parametrize(
    ("engine", "left"),
    [
        (Engine(answer(pack(head=PLAIN._replace(status=400), body=b"{}", usage=RequestUsage()))), 10_000),
        (Engine(answer(pack(head=STREAM, body=b"data: x\n\n"), END)), None),
        (Engine(answer(pack(head=PLAIN, body=b"[]", usage=RequestUsage()))), 10_000),
    ],
    ids=["refused by the engine", "a stream without usage", "a function without tokens"],
)
async def test_an_answer_without_usage(site: Site, engine: Engine, left: int | None) -> None:
    client, quotas, _ = site(engine, research={"tokens_per_day": 10_000})
    await client.post(CHAT, json=BODY)
    remaining = await quotas.left("tenant research", "tokens_per_day")
    if left is None:
        assert abs(10_000 - remaining - SIZE) < 50, "all that it has reserved"
    else:
        assert remaining == left


async def test_a_client_that_leaves_uses_up_what_it_has_reserved(site: Site) -> None:
    async def endless(request: RelayRequest) -> AsyncGenerator[bytes, None]:
        yield pack(head=STREAM, body=b"data: x\n\n")
        await asyncio.Event().wait()

    _, quotas, ingress = site(Engine(endless), research={"tokens_per_day": 10_000, "max_concurrency": 5})
    app = ingress.__serve_build_asgi_app__()

    async def with_key(scope: Any, receive: Any, send: Any) -> None:
        scope["headers"] = [*scope["headers"], (b"authorization", f"Bearer {SECRET}".encode())]
        await app(scope, receive, send)

    call = Call(cast(Any, with_key), CHAT, json.dumps(BODY).encode())
    assert (await call.next())["status"] == 200
    assert await quotas.left("tenant research", "max_concurrency") == 4
    await call.leave()
    assert await quotas.left("tenant research", "max_concurrency") == 5
    assert abs(10_000 - await quotas.left("tenant research", "tokens_per_day") - SIZE) < 50


async def test_other_answers_of_a_key_have_the_headers_too(site: Site) -> None:
    client, _, _ = site(used(1, 1), {"tokens_per_minute": 5_000})
    await client.post(CHAT, json=BODY)
    response = await client.get("/v1/models/nothing")
    assert response.status_code == 404
    assert response.headers["x-ratelimit-limit-tokens"] == "5000"


async def test_a_key_without_a_quota_has_no_headers(site: Site) -> None:
    client, _, _ = site(used(1, 1))
    response = await client.post(CHAT, json=BODY)
    assert response.status_code == 200
    assert not [name for name in response.headers if name.startswith("x-ratelimit")]


def test_a_key_with_a_quota_needs_the_deployment(tmp_path: Path) -> None:
    entry = {"name": "ada", "sha256": "a" * 64, "tenant": "t", "quota": {"tokens_per_day": 5}}
    (tmp_path / "keys.yaml").write_text(json.dumps([entry]))
    settings = parse(
        {
            "models": [{"id": "demo", "source": "x"}],
            "access": {"keys_file": str(tmp_path / "keys.yaml")},
        }
    )
    with pytest.raises(SettingsError, match=r"the quota of the key 'ada' needs args\.usage\.quotas"):
        Ingress(settings, {})


async def test_a_request_for_a_model_that_sleeps_comes_again_once_its_context_is_known(
    site: Site, health: dict[str, ModelHealth], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = used(10, 20)
    waking = Waking(engine, health, 4096)
    monkeypatch.setattr(models, "start_replica", waking)
    client, _, _ = site(engine, context=None, research={"tokens_per_day": 10_000})
    body = {"messages": BODY["messages"]}
    response = await client.post(CHAT, json=body)
    # Without a context it is taken for the largest one.
    assert (response.status_code, response.headers["retry-after"]) == (503, "15")
    assert "context length is not known" in response.json()["error"]["message"]
    await waking.started.wait()
    assert (await client.post(CHAT, json=body)).status_code == 200
