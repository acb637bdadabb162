"""Ten times the load that the engine can serve, from many tenants and tiers; one tenant beside another.

The short forms are seconds of it. The long ones are long enough to hold the figures against the README.
"""

import asyncio
import json
import subprocess
import sys
import time
from typing import Any

import httpx
import psutil
import pytest

from batcher.stats import percentiles
from tests.e2e.service import ROOT, Service
from tests.e2e.waiting import batcher, wait_until_idle


def memory_mib(service: Service) -> float:
    """Return the memory of all processes of a service; what they share is divided among them."""
    total = 0
    for pid in service.pids():
        try:
            total += psutil.Process(pid).memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("seconds", "follow", "patience_s"),
    [(2.0, 0.5, 8.0), pytest.param(60.0, 0.05, 60.0, marks=pytest.mark.long)],
)
def test_ten_times_the_load(small: Service, seconds: float, follow: float, patience_s: float) -> None:
    port = int(small.url.rsplit(":", 1)[1])
    before = memory_mib(small)
    numbers = map(str, (port, seconds, follow, patience_s))
    command = [sys.executable, "-m", "tests.e2e.flood", *numbers]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        peak_mib = before
        limit = time.monotonic() + 60 + seconds + 120
        while process.poll() is None:
            assert time.monotonic() < limit
            peak_mib = max(peak_mib, memory_mib(small))
            time.sleep(2.0)
        assert process.stdout
        output = process.stdout.read()
    assert process.returncode == 0
    found: dict[str, Any] = json.loads(output.splitlines()[-1])
    found |= {"memory_mib": round(before), "memory_peak_mib": round(peak_mib)}
    print(json.dumps(found, indent=1))

    statuses = {int(status): count for status, count in found["statuses"].items()}
    # A request that was accepted got an answer; the others were told so.
    assert set(statuses) <= {200, 408, 429}
    assert sum(statuses.values()) == found["sent"]
    assert statuses[429] > 5
    assert found["told"][0] >= 1
    # A tenant that sends little is served, though another fills the queue.
    assert all(found["by_tenant"].get(tenant) for tenant in "abcdef")
    if seconds >= 60:
        # A few seconds say little about these.
        assert statuses[429] > found["sent"] / 2
        assert found["retried"] > 5
        # None starts late, and one that can't start is told in time: a second, and the time of the machine.
        assert found["late"] < 1.5
        assert found["succeeded"] >= 0.9 * found["retried"]
        assert found["goodput"] >= 0.9 * found["peak"]
        assert found["after_p95"] <= 1.5 * found["calm_p95"]
    assert peak_mib - before < 300
    with httpx.Client(base_url=small.url, timeout=60) as http:
        wait_until_idle(http, 30)
        stats = batcher(http)
        ended = ("completed", "failed", "cancelled", "expired")
        assert stats["total_submitted"] == sum(stats[f"total_{end}"] for end in ended)
        # The engine reports its steps, and estimates follow from them.
        assert 0 < stats["expected_ttft_s"] < 60
        assert stats["background_window"] >= 1


async def light(client: httpx.AsyncClient, count: int) -> list[float]:
    """Return how long requests of the light tenant took that came one after the other."""
    took = []
    for _ in range(count):
        body = {"prompts": ["What is 1+1?"], "max_tokens": 32, "ignore_eos": True, "tenant": "light"}
        start = time.monotonic()
        response = await client.post("/generate", json=body)
        took.append(time.monotonic() - start)
        assert response.status_code == 200
    return took


@pytest.mark.long
async def test_one_tenant_does_not_raise_the_other_s_latency(small: Service) -> None:
    heavy: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "tenant": "heavy"}
    async with httpx.AsyncClient(base_url=small.url, timeout=120) as client:

        async def forever(prompts: int) -> None:
            while True:
                response = await client.post(
                    "/generate", json=heavy | {"prompts": ["What is 1+1?"] * prompts}
                )
                assert response.status_code == 200

        async def beside(calls: int, prompts: int) -> list[float]:
            tasks = [asyncio.create_task(forever(prompts)) for _ in range(calls)]
            try:
                await light(client, 5)
                return await light(client, 200)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.wait(tasks)

        # Twice as many as run at once keep the engine full; then more than fifty times the light one's.
        full = percentiles(await beside(16, 1), (0.5, 0.99))
        flooded = percentiles(await beside(2, 400), (0.5, 0.99))
    print(f"p50, p99 in a full engine {full} s, beside a flood {flooded} s")
    assert flooded[0] <= 1.25 * full[0]
    assert flooded[1] <= 1.25 * full[1]
