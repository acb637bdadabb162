"""Ten times the load that the engine can serve, from many tenants and tiers; one tenant beside another.

`test_queue_full.py` has the refusals of a full queue in the short run.
"""

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

import httpx
import psutil
import pytest
import yaml

from batcher.stats import percentiles
from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.e2e.services import local
from tests.e2e.waiting import batcher, wait_until_idle
from tests.progress import ANSWER_S, wait_until

pytestmark = pytest.mark.long

QUEUE = 60
"""Requests that wait at most: a few seconds' worth of eight sequences at once."""


def memory_mib(service: Service) -> float:
    """Return the memory of all processes of a service; what they share is divided among them."""
    total = 0
    for pid in service.pids():
        try:
            total += psutil.Process(pid).memory_full_info().pss
        except psutil.NoSuchProcess:
            continue
    return total / 2**20


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two Ingress replicas, and an Engine of eight sequences at once with a short queue."""
    config, app, model = local()
    model["batcher"] |= {"max_running": 8, "max_queue_size": QUEUE, "goals": {"ttft_p99_s": 1.0}}
    for deployment in app["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0}
        if deployment["name"] == "Ingress":
            deployment["num_replicas"] = 2
    service = Service(config, tmp_path_factory.mktemp("small"))
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A simulated H100 with a short queue, which needs none of the cores that a refusal takes."""
    folder = tmp_path_factory.mktemp("device")
    config: JSON = yaml.safe_load((ROOT / "configs/simulated.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    model["id"] = "demo"
    model["batcher"] |= {"max_running": 16, "max_queue_size": QUEUE, "goals": {"ttft_p99_s": 1.0}}
    ingress, engine = app["deployments"]
    ingress |= {"num_replicas": 2, "ray_actor_options": {"num_cpus": 0}}
    engine |= {"name": "Engine:demo", "num_replicas": 1}
    service = Service(config, folder)
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


def test_ten_times_the_load_for_seconds(small: Service) -> None:
    found = flood(small, seconds=2.0, follow=0.5, patience_s=8.0)
    check_answers(found)
    check_batcher(small)


def test_ten_times_the_load_for_a_minute(device: Service) -> None:
    found = flood(device, seconds=60.0, follow=0.02, patience_s=75.0)
    check_answers(found)
    statuses = found["statuses"]
    assert statuses["429"] > found["sent"] / 2
    # None starts late, and one that can't start is told in time: a second, and the time of the machine.
    assert found["late"] < 1.5
    # During the flood one that comes back is served as often as one that comes first; after it, always.
    share = statuses["200"] / found["sent"]
    assert found["succeeded"] >= 0.5 * share * found["retried"]
    assert found["returned"] > 20
    assert found["welcome"] >= 0.9 * found["returned"]
    assert found["goodput"] >= 0.9 * found["peak"]
    assert found["after_p95"] <= 1.5 * found["calm_p95"]
    check_batcher(device)


def flood(service: Service, seconds: float, follow: float, patience_s: float) -> JSON:
    """Send a flood to a service; return what it found, with the memory of the service before and at most."""
    port = int(service.url.rsplit(":", 1)[1])
    # The answer waits for the process that compiles grammars, which loads vLLM after the service is ready.
    grammar = {"model": "demo", "prompt": "1+1", "max_tokens": 1, "structured_outputs": {"regex": "[0-9]"}}
    httpx.post(f"{service.url}/v1/completions", json=grammar, timeout=ANSWER_S).raise_for_status()
    before = peak = memory_mib(service)
    command = [sys.executable, "-m", "tests.e2e.flood", *map(str, (port, seconds, follow, patience_s))]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:

        def has_ended() -> bool:
            nonlocal peak
            peak = max(peak, memory_mib(service))
            return process.poll() is not None

        wait_until(has_ended, every_s=2.0)
        assert process.stdout
        output = process.stdout.read()
    assert process.returncode == 0
    found: JSON = json.loads(output.splitlines()[-1])
    found |= {"memory_mib": round(before), "memory_peak_mib": round(peak)}
    print(json.dumps(found, indent=1))
    return found


def check_answers(found: JSON) -> None:
    """Check that a request that was accepted got an answer, and that the others were told so."""
    statuses = found["statuses"]
    assert set(statuses) <= {"200", "408", "429"}
    assert sum(statuses.values()) == found["sent"]
    assert statuses["429"] > 5
    assert found["told"][0] >= 1
    # A tenant that sends little is served, though another fills the queue.
    assert all(found["by_tenant"].get(tenant) for tenant in "abcdef")
    assert found["memory_peak_mib"] - found["memory_mib"] < 300


def check_batcher(service: Service) -> None:
    """Check that the books of the batcher balance when all has ended."""
    with httpx.Client(base_url=service.url, timeout=ANSWER_S) as http:
        wait_until_idle(http)
        stats = batcher(http)
    ended = ("completed", "failed", "cancelled", "expired")
    assert stats["total_submitted"] == sum(stats[f"total_{end}"] for end in ended)
    assert stats["background_running"] == 0


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


async def test_one_tenant_does_not_raise_the_other_s_latency(small: Service) -> None:
    heavy: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "tenant": "heavy"}
    async with httpx.AsyncClient(base_url=small.url, timeout=ANSWER_S) as client:

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
