"""Shares of adapters in a live service on a simulated device, through the `openai` client."""

import asyncio
from collections.abc import Callable, Iterator

import httpx
import openai
import pytest
import yaml

from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.e2e.services import LIMIT_S
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

FLOOD, RUNNING = 40, 4


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A simulated H100 that runs few requests at once, with two adapters."""
    config: JSON = yaml.safe_load((ROOT / "configs/simulated.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    model["id"] = "demo"
    model["adapters"] = [{"source": f"saturate://demo/{name}"} for name in ("letters", "symbols")]
    model["batcher"]["max_running"] = RUNNING
    ingress, engine = app["deployments"]
    ingress["ray_actor_options"] = {"num_cpus": 0}
    engine |= {"name": "Engine:demo", "num_replicas": 1}
    service = Service(config, tmp_path_factory.mktemp("shares"))
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


async def wait_for_queue(http: httpx.AsyncClient, reached: Callable[[int], bool]) -> None:
    """Wait until the number of requests that wait or run is as it should be."""
    async with asyncio.timeout(LIMIT_S):
        while True:
            (replica,) = (await http.get("/stats")).json()["models"]["demo"]["replicas"]
            if reached(replica["batcher"]["queue_depth"] + replica["batcher"]["running"]):
                return


async def ended_before(service: Service, headers: dict[str, str]) -> int:
    """Return how many requests of a flood have ended when one for another adapter is answered."""
    async with (
        httpx.AsyncClient(base_url=service.url, timeout=ANSWER_S) as http,
        openai.AsyncOpenAI(
            base_url=f"{service.url}/v1", api_key="none", default_headers=headers, max_retries=0
        ) as client,
    ):

        async def ask(model: str) -> None:
            await client.completions.create(
                model=model, prompt="What is 1+1?", max_tokens=64, extra_body={"ignore_eos": True}
            )

        flood = [asyncio.create_task(ask("demo:letters")) for _ in range(FLOOD)]
        try:
            await wait_for_queue(http, lambda count: count + sum(task.done() for task in flood) >= FLOOD)
            await ask("demo:symbols")
            return sum(task.done() for task in flood)
        finally:
            for task in flood:
                task.cancel()
            await asyncio.wait(flood)
            await wait_for_queue(http, lambda count: not count)


async def test_a_flood_on_an_adapter_holds_up_another_only_within_a_named_tenant(device: Service) -> None:
    assert await ended_before(device, {}) <= FLOOD - 3 * RUNNING
    assert await ended_before(device, {"x-tenant": "acme"}) >= FLOOD - RUNNING
