"""Health, statistics, the page, disconnects and the queue's bound."""

import asyncio

import httpx
import pytest

from batcher import BatchStats, ContinuousStats
from serve_app.stats import ServiceHealth, ServiceStats
from tests.e2e.service import Service
from tests.e2e.waiting import batcher, wait_until_idle
from tests.progress import ANSWER_S

PROMPTS = ["once upon"] * 40
TOKENS = 1900
LONG = {"model": "demo", "prompt": PROMPTS, "max_tokens": TOKENS, "ignore_eos": True}
"""Keeps the engine busy for some ten seconds."""

KINDS = (("demo", ContinuousStats), ("minilm", BatchStats))
"""The batchers of the models."""


def test_health(http: httpx.Client) -> None:
    response = http.get("/health")
    assert response.status_code == 200
    ready = {"state": "ready", "replicas": 1}
    assert response.json() == {"status": "ok", "models": {"demo": ready, "minilm": ready}}


def test_there_is_no_warning_about_keys_on_loopback(service: Service) -> None:
    """The Ingress knows on which address Serve listens."""
    assert not [path for path, text in service.logs().items() if "asks for no API key" in text]


def test_page(http: httpx.Client) -> None:
    response = http.get("/")
    assert response.headers["content-type"].startswith("text/html")
    assert "frame-ancestors 'none'" in response.headers["content-security-policy"]
    assert http.get("/", headers={"if-none-match": response.headers["etag"]}).status_code == 304


def test_stats_count_what_was_served(http: httpx.Client) -> None:
    before = batcher(http)
    assert http.post("/generate", json={"prompts": ["What is 1+1?"] * 7}).status_code == 200
    after = batcher(http)
    assert after["total_submitted"] - before["total_submitted"] == 7
    assert after["total_completed"] - before["total_completed"] == 7
    assert after["capacity"] >= 60_000


def test_the_schema_has_all_that_statistics_and_health_say(http: httpx.Client) -> None:
    for path, schema in (("/stats", ServiceStats), ("/health", ServiceHealth)):
        body = http.get(path).json()
        assert schema.model_validate(body).body() == body
    stats = ServiceStats.model_validate(http.get("/stats").json())
    assert stats.batches
    assert stats.quotas
    assert [isinstance(stats.models[name].replicas[0].batcher, kind) for name, kind in KINDS] == [True, True]


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_leaves_frees_its_place_at_once(http: httpx.Client, stream: bool) -> None:
    wait_until_idle(http)
    before = batcher(http)
    with httpx.Client(base_url=http.base_url, timeout=ANSWER_S) as leaver:
        if stream:
            with leaver.stream("POST", "/v1/completions", json=LONG | {"stream": True}) as response:
                pieces = response.iter_raw()
                next(pieces)
                assert batcher(http)["running"] == len(PROMPTS)
        else:
            with pytest.raises(httpx.ReadTimeout):
                leaver.post("/v1/completions", json=LONG, timeout=0.5)
    check_that_it_was_dropped(http, before, TOKENS)


def check_that_it_was_dropped(http: httpx.Client, before: dict[str, float], tokens: int) -> None:
    """Check that a list ended long before its answers would have; its tokens tell the time on any machine."""
    wait_until_idle(http)
    after = batcher(http)
    found = {name: after[name] - before[name] for name in after if name.startswith("total_")}
    print(found, after["output_tokens"] - before["output_tokens"])
    assert found["total_completed"] == 0
    assert found["total_cancelled"] == found["total_submitted"]


def test_a_list_whose_client_leaves_is_dropped(http: httpx.Client) -> None:
    wait_until_idle(http)
    before = batcher(http)
    body = {"prompts": ["once upon"] * 300, "max_tokens": 1900, "ignore_eos": True}
    with (
        httpx.Client(base_url=http.base_url) as leaver,
        pytest.raises(httpx.ReadTimeout),
    ):
        leaver.post("/generate", json=body, timeout=1.0)
    check_that_it_was_dropped(http, before, 1900)


async def test_many_streams_at_once_are_whole_and_in_order(service: Service) -> None:
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as client:

        async def ask(first: int) -> str:
            body = {"model": "demo", "prompt": f"What is {first}+1?", "stream": True, "temperature": 0}
            async with client.stream("POST", "/v1/completions", json=body) as response:
                lines = [line async for line in response.aiter_lines() if line.startswith("data: ")]
            assert lines[-1] == "data: [DONE]"
            chunks = [httpx.Response(200, content=line[6:]).json() for line in lines[:-1]]
            return "".join(chunk["choices"][0]["text"] for chunk in chunks)

        answers = await asyncio.gather(*(ask(first) for first in range(64)))
    assert answers == [str(first + 1) for first in range(64)]
