"""A service as the measurement sees it: over loopback, and its errors."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from serve_app.client import ServiceError
from serve_app.tuning.service import LoadAnswer, LoadRequest, Service

LLM = {"id": "m", "owned_by": "saturate", "kind": "llm", "parent": None, "max_model_len": 4096}
BATCHER = {"capacity": 9_000, "max_running": 8, "running": 1, "queue_depth": 2, "total_submitted": 5}
Play = Callable[[httpx.Request], httpx.Response]


def service(answer: Play) -> Service:
    return Service("http://there/v1/", transport=httpx.MockTransport(answer))


def cards(*found: Any) -> Play:
    return lambda request: httpx.Response(200, json={"data": list(found)})


@asynccontextmanager
async def loopback(events: list[Any]) -> AsyncIterator[tuple[str, list[Any]]]:
    """Serve answers that consist of these events; yield the URL and the bodies that came."""
    bodies = []

    async def complete(request: web.Request) -> web.StreamResponse:
        bodies.append(await request.json())
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        for event in events:
            await response.write(f"data: {json.dumps(event)}\n\n".encode())
            await asyncio.sleep(0)
        await response.write(b"data: [DONE]\n\n")
        return response

    app = web.Application()
    app.router.add_post("/v1/completions", complete)
    runner = web.AppRunner(app)
    await runner.setup()
    try:
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        yield f"http://127.0.0.1:{runner.addresses[0][1]}", bodies
    finally:
        await runner.cleanup()


def piece(tokens: int) -> Any:
    return {"choices": [{"text": "a"}], "usage": {"completion_tokens": tokens}}


async def ask(service: Service) -> LoadAnswer:
    answer = LoadAnswer(service.clock(), 6)
    body = {"model": "m", "stream_options": {"include_usage": True}}
    await service.send(LoadRequest("/v1/completions", body, 6), answer)
    return answer


async def test_an_answer_has_the_times_of_its_tokens() -> None:
    events = [*map(piece, [1, 2, 6]), {"choices": [], "usage": {"completion_tokens": 6}}]
    async with loopback(events) as (url, bodies), Service(url) as found:
        answer = await ask(found)
    assert len(bodies) == 1
    assert answer.first_at is not None
    assert answer.ended_at is not None
    assert answer.sent_at < answer.first_at <= answer.ended_at
    assert (answer.tokens, answer.failed) == (6, False)


async def test_an_answer_without_usage_broke_off() -> None:
    async with loopback([{"choices": [{"text": "a"}]}]) as (url, _), Service(url) as found:
        with pytest.raises(ServiceError, match="an answer broke off, or has no token"):
            await ask(found)


async def test_an_answer_that_breaks_off_is_an_error() -> None:
    events = [piece(1), {"error": {"message": "the engine died"}}]
    async with loopback(events) as (url, _), Service(url) as found:
        with pytest.raises(ServiceError, match="an answer broke off: the engine died"):
            await ask(found)


async def test_the_facts_are_those_of_the_smallest_replica() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [LLM]})
        larger = BATCHER | {"capacity": 10_000, "running": 0}
        replicas = [{"batcher": BATCHER}, {"batcher": larger}]
        return httpx.Response(200, json={"models": {"m": {"replicas": replicas}}})

    async with service(answer) as found:
        assert await found.find(None) == "m"
        facts = await found.facts("m")
    assert (facts.max_model_len, facts.replicas, facts.kv_tokens, facts.max_num_seqs) == (4096, 2, 9_000, 8)
    assert (facts.in_flight, facts.submitted) == (5, 10)


async def test_adapters_and_functions_are_no_models_to_measure() -> None:
    adapter, function = LLM | {"id": "m:a", "parent": "m"}, LLM | {"id": "f", "kind": "function"}
    async with service(cards(LLM, adapter, function)) as found:
        assert await found.find(None) == "m"


@pytest.mark.parametrize(
    ("answer", "model", "message"),
    [
        (cards(LLM), "n", "it has no model 'n'; there are m"),
        (cards(LLM, LLM | {"id": "n"}), None, "several models; choose with --model: m, n"),
        (cards(), None, "it serves no language model"),
        (cards(LLM | {"owned_by": "vllm"}), None, "not as saturate does"),
        (lambda request: httpx.Response(404), None, "/v1/models: 404 Not Found"),
        (
            lambda request: httpx.Response(200, text="<html>"),
            None,
            "the answer to /v1/models is of another form",
        ),
        (lambda request: httpx.Response(200, json=[1]), None, "not as saturate does"),
        (
            lambda request: httpx.Response(401, json={"error": {"message": "no key"}}),
            None,
            r"401 \(no key\); name the environment variable that holds your API key",
        ),
        (lambda request: httpx.Response(503, text="away"), None, r"503 \(away\)"),
    ],
)
async def test_a_service_that_cannot_be_measured_says_why(
    answer: Play, model: str | None, message: str
) -> None:
    async with service(answer) as found:
        with pytest.raises(ServiceError, match=message):
            await found.find(model)


async def test_no_service_at_all_is_told() -> None:
    # Port 9 has no server.
    async with Service("http://127.0.0.1:9") as found:
        with pytest.raises(ServiceError, match="no service is there"):
            await found.find(None)


async def test_statistics_without_a_replica_are_told() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        if request.url.path == "/v1/models":
            return httpx.Response(200, json={"data": [LLM]})
        return httpx.Response(200, json={"models": {"m": {"replicas": []}}})

    async with service(answer) as found:
        with pytest.raises(ServiceError, match="/stats has nothing about m: it has no replica"):
            await found.facts("m")


async def test_a_full_queue_is_told() -> None:
    refusal = httpx.Response(429, json={"error": {"message": "the queue is full"}})
    async with service(lambda request: refusal) as found:
        with pytest.raises(ServiceError, match=r"429 \(the queue is full\); the service is busy"):
            await ask(found)


def test_an_address_without_a_scheme_is_one_of_http() -> None:
    assert Service("127.0.0.1:8000").url == "http://127.0.0.1:8000"
    with pytest.raises(ServiceError, match="must begin with http://"):
        Service("ftp://127.0.0.1:8000")
