"""Priority, tenants and deadlines of requests, on a real engine."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Literal

import httpx
import openai
import pytest

from tests.e2e.service import Service
from tests.e2e.waiting import batcher, wait_until_idle
from tests.progress import ANSWER_S

QUESTION = "What is 1+1?"
CHAT: dict[str, Any] = {"model": "demo", "messages": [{"role": "user", "content": QUESTION}]}
LARGE = {"max_tokens": 1900}
"""A reservation that fits into no rest of a full window, though the answer is short."""

Answer = asyncio.Future[httpx.Response]


@asynccontextmanager
async def full_window(
    service: Service, http: httpx.Client
) -> AsyncIterator[tuple[httpx.AsyncClient, Answer]]:
    """Keep the engine's window full for more than ten seconds, or until the task is cancelled."""
    await asyncio.to_thread(wait_until_idle, http)
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S, limits=limits) as client:
        body = {"prompts": ["once upon"] * 200, "tenant": "flood", "ignore_eos": True} | LARGE
        flood = asyncio.ensure_future(client.post("/generate", json=body))
        await reached(http, "queue_depth", 1, flood)
        yield client, flood
        flood.cancel()
        await asyncio.wait([flood])


async def reached(http: httpx.Client, name: str, least: float, *tasks: Answer) -> None:
    """Wait until one of the batcher's statistics is as large; none of `tasks` may end before."""
    while (await asyncio.to_thread(batcher, http))[name] < least:
        for task in tasks:
            assert not task.done(), task.result().text


Group = tuple[dict[str, Any], dict[str, str]]
"""The fields of the bodies and the headers of some requests."""


PROMPTS = 4
"""In each request of `ranks`."""


async def ranks(service: Service, http: httpx.Client, groups: Mapping[str, Group]) -> dict[str, list[float]]:
    """Queue groups of requests, one group after the other, then let them run.

    Each group asks for as many prompts as the window holds, four in a request: many requests take
    long to queue, and few tell little of their order. An answer takes a second, beside which the
    way of an answer through a busy machine is short.

    Returns:
        Of each group, the places of its requests in the order of the answers, in windows.
    """
    order: list[str] = []
    tasks: list[Answer] = []
    async with full_window(service, http) as (client, flood):

        async def ask(name: str, body: dict[str, Any], headers: dict[str, str]) -> httpx.Response:
            body = {"prompts": [QUESTION] * PROMPTS, "max_tokens": 100, "ignore_eos": True} | body
            response = await client.post("/generate", json=body, headers=headers)
            order.append(name)
            return response

        stats = await asyncio.to_thread(batcher, http)
        submitted, window = stats["total_submitted"], int(stats["running"]) // PROMPTS
        for name, (body, headers) in groups.items():
            tasks += [asyncio.ensure_future(ask(name, body, headers)) for _ in range(window)]
            submitted += window * PROMPTS
            # Not all of them wait: a small one may fit into what the flood leaves of the window.
            await reached(http, "total_submitted", submitted, flood, *tasks)
        flood.cancel()
        for response in await asyncio.gather(*tasks):
            assert response.json()["usage"]["completion_tokens"] == 100 * PROMPTS, response.text
    return {name: [place / window for place, other in enumerate(order) if other == name] for name in groups}


async def test_priority_goes_first_and_flex_behind_all_others(service: Service, http: httpx.Client) -> None:
    groups: dict[str, Group] = {
        "flex": ({"service_tier": "flex"}, {}),
        "default": ({}, {}),
        "priority": ({"service_tier": "priority"}, {}),
    }
    places = await ranks(service, http, groups)
    middle = {name: sum(at) / len(at) for name, at in places.items()}
    assert middle["priority"] < 0.8 < middle["default"] < 2.2 < middle["flex"]
    assert max(places["priority"]) < min(places["flex"])


@pytest.mark.parametrize(
    "groups",
    [
        # The header goes before the body, so this is not the same tenant twice.
        {"first": ({"tenant": "first"}, {}), "second": ({"tenant": "first"}, {"x-tenant": "second"})},
        {
            "first": ({}, {"authorization": "Bearer one"}),
            "second": ({}, {"authorization": "Bearer two"}),
        },
    ],
    ids=["named", "by key"],
)
async def test_two_tenants_share_in_any_order_of_arrival(
    service: Service, http: httpx.Client, groups: dict[str, Group]
) -> None:
    places = await ranks(service, http, groups)
    # Half of the first window is the second's; in order of arrival it would have none of it.
    early = [at for at in places["second"] if at < 1]
    assert 0.35 <= len(early) / len(places["second"]) <= 0.65


async def test_a_request_that_can_not_start_in_time_is_answered_408_and_never_run(
    service: Service, http: httpx.Client
) -> None:
    soon = {"x-queue-timeout-seconds": "0.5"}
    generate: dict[str, Any] = {"prompts": [QUESTION] * 2} | LARGE
    async with full_window(service, http) as (client, flood):
        before = await asyncio.to_thread(batcher, http)
        for path, body, headers in [
            ("/generate", generate, soon),
            ("/generate", generate | {"queue_timeout_s": 0.5}, {}),
            ("/generate", generate | {"queue_timeout_s": 60}, soon),
            ("/v1/completions", {"model": "demo", "prompt": QUESTION} | LARGE, soon),
            ("/v1/chat/completions", CHAT | LARGE, soon),
            ("/v1/chat/completions", CHAT | LARGE | {"stream": True}, soon),
        ]:
            response = await client.post(path, json=body, headers=headers)
            assert response.status_code == 408, response.text
            error = response.json()["error"]
            assert error["type"] == "timeout_error"
            assert "in the time it allows" in error["message"]
        partial = await client.post("/generate", json=generate | {"queue_timeout_s": 0.5, "partial": True})
        assert partial.json()["results"] == [None, None]
        assert [error["type"] for error in partial.json()["errors"]] == ["timeout_error"] * 2
        assert not flood.done()
        after = await asyncio.to_thread(batcher, http)
    ends = ("total_expired", "total_cancelled", "total_rejected")
    assert sum(after[end] - before[end] for end in ends) == 11
    assert after["total_completed"] == before["total_completed"]


def test_a_request_that_can_start_in_time_does(http: httpx.Client) -> None:
    wait_until_idle(http)
    headers = {"x-queue-timeout-seconds": "30", "x-tenant": "Jo Smith"}
    assert http.post("/generate", json={"prompts": [QUESTION]}, headers=headers).json()["results"] == ["2"]


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/generate", {"prompts": [QUESTION]}),
        ("/process", {"records": [QUESTION]}),
        ("/v1/chat/completions", CHAT),
        ("/v1/embeddings", {"model": "minilm", "input": QUESTION}),
    ],
)
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("x-queue-timeout-seconds", "soon"),
        ("x-queue-timeout-seconds", "0"),
        ("x-queue-timeout-seconds", "nan"),
        ("x-queue-timeout-seconds", "1e9"),
        ("x-tenant", ""),
        ("x-tenant", "a" * 129),
    ],
)
def test_a_wrong_header_is_named(
    http: httpx.Client, path: str, body: dict[str, Any], name: str, value: str
) -> None:
    response = http.post(path, json=body, headers={name: value})
    assert response.status_code == 400, response.text
    assert response.json()["error"]["param"] == name
    assert name in response.json()["error"]["message"]


@pytest.mark.parametrize("tier", ["auto", "default", "flex", "scale", "priority", "fast"])
def test_service_tier_of_the_openai_client(
    client: openai.OpenAI, tier: Literal["auto", "default", "flex", "scale", "priority"]
) -> None:
    answer = client.chat.completions.create(
        model="demo", messages=CHAT["messages"], temperature=0, service_tier=tier
    )
    assert answer.choices[0].message.content == "2"


def test_a_service_tier_that_is_none(client: openai.OpenAI, http: httpx.Client) -> None:
    with pytest.raises(openai.BadRequestError, match="service_tier"):
        client.chat.completions.create(**CHAT, service_tier="best")  # type: ignore[call-overload]
    response = http.post("/generate", json={"prompts": [QUESTION], "service_tier": "best"})
    assert response.status_code == 400
    assert response.json()["error"]["param"] == "service_tier"
