"""Two Ingress replicas and two Engine replicas share the load."""

import asyncio
import csv
import time
from collections.abc import Callable
from typing import Any

import httpx
import pytest

from tests.e2e.service import Service

# It takes what two cores have, so it runs when nothing else needs them.
pytestmark = pytest.mark.last

REQUESTS = 300


def both(read: Callable[[], dict[str, int]]) -> dict[str, int]:
    """Return what is read of both replicas; an Ingress takes a moment to learn of an Engine."""
    deadline = time.monotonic() + 60
    while len(found := read()) < 2:
        assert time.monotonic() < deadline, found
        time.sleep(0.2)
    return found


def by_engine(service: Service) -> dict[str, int]:
    """Return how many prompts each of the two Engine replicas has completed."""

    def read() -> dict[str, int]:
        replicas = httpx.get(f"{service.url}/stats").json()["models"]["demo"]["replicas"]
        return {replica["replica"]: replica["batcher"]["total_completed"] for replica in replicas}

    return both(read)


def by_ingress(service: Service) -> dict[str, int]:
    """Return how many requests HAProxy has sent to each of the two Ingress replicas."""
    port = service.env["RAY_SERVE_HAPROXY_STATS_PORT"]

    def read() -> dict[str, int]:
        text = httpx.get(f"http://127.0.0.1:{port}/stats;csv").text
        rows = csv.DictReader(text.removeprefix("# ").splitlines())
        return {row["svname"]: int(row["stot"]) for row in rows if "Ingress" in row["svname"]}

    return both(read)


async def ask(service: Service) -> list[Any]:
    """Ask sums, 32 at once, and return the answers."""
    limit = asyncio.Semaphore(32)
    async with httpx.AsyncClient(base_url=service.url, timeout=60) as client:

        async def one(number: int) -> Any:
            async with limit:
                body = {"prompts": [f"What is {number % 100}+1?"], "max_tokens": 16, "ignore_eos": True}
                return (await client.post("/generate", json=body)).json()

        return await asyncio.gather(*(one(number) for number in range(REQUESTS)))


async def test_both_replicas_of_each_get_their_share(pair: Service) -> None:
    engines, ingresses = by_engine(pair), by_ingress(pair)
    answers = await ask(pair)
    assert all(answer["usage"]["completion_tokens"] == 16 for answer in answers)
    after, behind = by_engine(pair), by_ingress(pair)
    shares = [after[replica] - before for replica, before in engines.items()]
    fronts = [behind[replica] - before for replica, before in ingresses.items()]
    print(f"prompts by Engine: {shares}; requests by Ingress: {fronts}")
    assert len(shares) == len(fronts) == 2
    assert sum(shares) == REQUESTS
    assert min(shares) >= 0.3 * REQUESTS
    assert sum(fronts) >= REQUESTS
    assert min(fronts) >= 0.3 * sum(fronts)
