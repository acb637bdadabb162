"""A request with which engines are lost, one after the other."""

import asyncio
from typing import Any

import httpx
import pytest

from tests.e2e.fault_injection import CORE, LIMIT_S
from tests.e2e.service import Service
from tests.e2e.services import is_settled, wait_for_replicas, wait_until
from tests.e2e.waiting import running
from tests.progress import ANSWER_S

BODY: dict[str, Any] = {"model": "demo", "prompt": "a", "max_tokens": 2000, "ignore_eos": True}
"""Seconds of work."""

pytestmark = pytest.mark.long


async def test_the_third_loss_is_its_result_and_it_is_not_refused_afterwards(
    pair: Service, http: httpx.Client
) -> None:
    await asyncio.to_thread(wait_until, lambda: is_settled(pair))
    count = len(pair.pids(CORE))
    async with httpx.AsyncClient(base_url=pair.url, timeout=ANSWER_S) as client:
        asked = asyncio.create_task(client.post("/v1/completions", json=BODY))
        killed: set[int] = set()

        def runs_elsewhere() -> bool:
            # A replica whose engine has died shows its work for a moment more.
            cores = set(pair.pids(CORE))
            return asked.done() or (bool(cores) and cores.isdisjoint(killed) and running(http) > 0)

        for _ in range(3):
            await asyncio.to_thread(wait_until, runs_elsewhere, LIMIT_S)
            # A request may lose both engines at once: the second has not yet noticed that its core is gone.
            if not asked.done():
                killed.update(pair.pids(CORE))
                pair.kill(CORE)
        lost = await asked
        assert len(killed) >= 3
        assert lost.status_code == 500
        assert lost.headers["x-should-retry"] == "false"
        assert "it is not tried again" in lost.json()["error"]["message"]
        await asyncio.to_thread(
            wait_until, lambda: len(pair.pids(CORE)) == count and is_settled(pair), LIMIT_S
        )
        await asyncio.to_thread(wait_for_replicas, pair, count)
        assert (await client.post("/v1/completions", json=BODY)).status_code == 200
