"""A service on simulated devices: their time, their answers, and what says that they are simulated."""

import asyncio
import re
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import yaml

from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.e2e.services import NODES, wait_until
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

STEP_MS = 25.0
"""Long steps, so that a machine that is busy keeps up."""

PROFILE = {
    "name": "slow",
    "base_ms": STEP_MS,
    "per_prefill_token_ms": 1.0,
    "per_sequence_ms": 0.0,
    "per_kv_token_ms": 0.0,
    "load_s": 0.5,
    "sleep_s": 0.1,
    "wake_s": 0.1,
    "kv_tokens": 2048,
    "max_model_len": 1024,
    "max_num_seqs": 32,
}
TEXT = "a simulated device takes its time. " * 30


@pytest.fixture(scope="module")
def simulated(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """The service of configs/simulated.yaml with one replica of another device, whose cache is too small."""
    folder = tmp_path_factory.mktemp("simulated")
    profile = folder / "slow.yaml"
    profile.write_text(yaml.safe_dump(PROFILE))
    config: JSON = yaml.safe_load((ROOT / "configs/simulated.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    model["simulate"] = str(profile)
    model["batcher"] |= {"policy": "max_utilization", "capacity_tokens": 100_000, "max_running": 32}
    for deployment in app["deployments"]:
        deployment |= {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
    service = Service(config, folder, metrics_ms=1000)
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


@pytest.fixture
async def http(simulated: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=simulated.url, timeout=ANSWER_S) as client:
        yield client


async def complete(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> Any:
    """Return the answer to one prompt of /v1/completions."""
    body = {"model": "simulated", "prompt": prompt, "max_tokens": max_tokens}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


async def text(http: httpx.AsyncClient, prompt: str, max_tokens: int) -> str:
    """Return the text of the answer to one prompt."""
    answer: str = (await complete(http, prompt, max_tokens))["choices"][0]["text"]
    return answer


async def test_it_says_that_it_is_simulated(http: httpx.AsyncClient, simulated: Service) -> None:
    health = (await http.get("/health")).json()
    assert health["models"] == {"simulated": {"state": "ready", "replicas": 1, "simulated": "slow"}}
    (card,) = (await http.get("/v1/models")).json()["data"]
    assert (card["simulated"], card["max_model_len"]) == ("slow", 1024)
    (one,) = [await http.get("/v1/models/simulated")]
    assert one.json()["simulated"] == "slow"
    said = "simulated is simulated (slow): no model runs"
    assert [path for path, log in simulated.logs().items() if said in log]


async def test_a_stream_takes_the_time_of_the_profile(http: httpx.AsyncClient) -> None:
    body = {"model": "simulated", "prompt": "x" * 50, "max_tokens": 100, "stream": True}
    began = time.monotonic()
    seen = []
    async with http.stream("POST", "/v1/completions", json=body) as response:
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                seen.append(time.monotonic())
    assert seen[0] - began >= (STEP_MS + 50) / 1000
    rate = 99 / (seen[-1] - seen[0])
    assert rate == pytest.approx(1000 / STEP_MS, rel=0.1)


async def test_a_prompt_has_one_answer_alone_and_among_others(http: httpx.AsyncClient) -> None:
    alone = await text(http, "who are you?", 60)
    assert len(alone) == 60
    assert alone.isalpha()
    among, *_ = await asyncio.gather(
        text(http, "who are you?", 60), *(text(http, f"{number} is a number", 40) for number in range(8))
    )
    assert among == alone
    assert await text(http, f"who are you?{alone[:25]}", 35) == alone[25:]


async def test_a_prefix_is_cached(http: httpx.AsyncClient) -> None:
    prompt = f"prefix: {TEXT}"[:800]
    began = time.monotonic()
    await text(http, prompt, 1)
    cold = time.monotonic() - began
    began = time.monotonic()
    await text(http, f"{prompt}!", 1)
    warm = time.monotonic() - began
    # 800 tokens of a prompt take 800 ms, the last block of it and a letter 17.
    assert cold - warm == pytest.approx(0.8, abs=0.25)


async def test_requests_are_preempted_where_the_cache_is_small(
    http: httpx.AsyncClient, simulated: Service
) -> None:
    prompts = [f"{number} {TEXT}"[:60] for number in range(8)]
    together = await asyncio.gather(*(text(http, prompt, 240) for prompt in prompts))
    (node,) = simulated.run_python(NODES)
    wait_until(lambda: preempted(httpx.get(f"http://{node}/metrics", timeout=ANSWER_S).text) > 0)
    assert await text(http, prompts[-1], 240) == together[-1]


def preempted(metrics: str) -> float:
    """Return vLLM's count of preempted requests on a page of metrics."""
    counts = re.findall(r"^ray_vllm_num_preemptions_total\{.*\} (\S+)$", metrics, re.M)
    return sum(map(float, counts))
