"""Three models that take turns on one simulated device, under Ray Serve, with load and deaths in between."""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import httpx
import pytest
import yaml

from serve_app.api.protocol import JSON
from tests.e2e.service import ROOT, Service
from tests.e2e.services import wait_until
from tests.progress import ANSWER_S

pytestmark = pytest.mark.long

MODELS = ("one", "two", "three")

PIN_S = 5.0
"""Seconds more that the first sleep of a model takes."""

PROFILE = {
    "name": "small",
    "base_ms": 10.0,
    "per_prefill_token_ms": 0.03,
    "per_sequence_ms": 0.04,
    "per_kv_token_ms": 0.000039,
    "load_s": 0.2,
    "sleep_s": 0.1,
    "wake_s": 0.1,
    "pin_s": PIN_S,
    "kv_tokens": 16_384,
    "max_model_len": 2_048,
    "max_num_seqs": 64,
    "device_gb": 80.0,
    "awake_gb": 72.0,
}

MIN_TURN_S, MAX_WAIT_S = 1.0, 10.0


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """A service whose three models share a device."""
    folder = tmp_path_factory.mktemp("shared")
    config: JSON = yaml.safe_load((ROOT / "configs/simulated.yaml").read_text())
    (app,) = config["applications"]
    (model,) = app["args"]["models"]
    model |= {"simulate": PROFILE, "share": "trio"}
    app["args"]["models"] = [model | {"id": name} for name in MODELS]
    app["args"]["share_groups"] = {
        "trio": {"min_turn_s": MIN_TURN_S, "max_wait_s": MAX_WAIT_S, "self_check": True}
    }
    app["deployments"] = [
        {"name": name, "num_replicas": 1, "ray_actor_options": {"num_cpus": 0}}
        for name in ("Ingress", *(f"Engine:{name}" for name in MODELS))
    ]
    service = Service(config, folder)
    yield service
    service.stop()
    assert service.processes() == [], "processes are left behind"


@pytest.fixture
async def http(shared: Service) -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(base_url=shared.url, timeout=ANSWER_S) as client:
        yield client


async def complete(http: httpx.AsyncClient, model: str, number: int, max_tokens: int = 64) -> float:
    """Answer one prompt, and return the seconds that it took."""
    began = time.monotonic()
    body = {"model": model, "prompt": f"{number}: what is next?", "max_tokens": max_tokens}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.json()["usage"]["completion_tokens"] == max_tokens
    return time.monotonic() - began


def turns(service: Service) -> dict[str, Any]:
    """Return the turn of each model that has a replica."""
    models = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()["models"]
    return {name: one["turn"] for name in models for one in models[name]["replicas"]}


async def test_the_first_switch_is_as_fast_as_the_others(http: httpx.AsyncClient) -> None:
    rounds = [[await complete(http, model, number, 1) for model in MODELS] for number in range(3)]
    print(f"\nseconds of the first token of each model, by round: {rounds}")
    assert max(map(max, rounds)) < PIN_S


async def test_all_requests_of_three_models_are_answered(http: httpx.AsyncClient, shared: Service) -> None:
    assert set(turns(shared)) == set(MODELS)
    overlaps = []
    ended = asyncio.Event()

    async def watch() -> None:
        while not ended.is_set():
            found = await asyncio.to_thread(turns, shared)
            overlaps.append([name for name in found if found[name]["state"] in {"awake", "draining"}])
            await asyncio.sleep(0.1)

    async def send(model: str, wave: int) -> list[float]:
        await asyncio.sleep(wave * 1.5)
        return await asyncio.gather(*(complete(http, model, wave * 100 + n) for n in range(8)))

    watching = asyncio.create_task(watch())
    took = await asyncio.gather(*(send(model, wave) for wave in range(6) for model in MODELS))
    ended.set()
    await watching
    assert max(max(wave) for wave in took) < MAX_WAIT_S + 10.0
    # The replicas are asked one after the other: a switch may lie in between.
    assert max(map(len, overlaps)) <= 2
    assert {name for awake in overlaps for name in awake} == set(MODELS)
    found = turns(shared)
    assert all(one["turns"] >= 2 for one in found.values())
    # Its own times, and what messages take on a busy machine.
    assert all(
        0.1 <= one["wake_s"] < 5 and 0.1 <= one["sleep_s"] < 5 for one in found.values() if one["sleep_s"]
    )


async def test_a_list_and_streams_take_turns_too(http: httpx.AsyncClient) -> None:
    async def listed(model: str) -> None:
        body = {"model": model, "prompts": [f"prompt {n}" for n in range(40)], "max_tokens": 32}
        answer = await http.post("/generate", json=body)
        assert [len(text) for text in answer.json()["results"]] == [32] * 40, answer.text

    async def streamed(model: str) -> None:
        body = {"model": model, "prompt": "a stream", "max_tokens": 40, "stream": True}
        async with http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line async for line in response.aiter_lines() if line]
        assert lines[-1] == "data: [DONE]"

    await asyncio.gather(*(ask(model) for model in MODELS for ask in (listed, streamed)))


async def test_the_group_recovers_from_the_death_of_the_engine_that_is_awake(
    http: httpx.AsyncClient, shared: Service
) -> None:
    found = turns(shared)
    awake = next(name for name in MODELS if found[name]["state"] == "awake")
    others = [name for name in MODELS if name != awake]
    assert await asyncio.to_thread(shared.kill, f"ServeReplica:llm:Engine:{awake}") == 1
    await asyncio.gather(*(complete(http, model, n) for n in range(8) for model in others))
    wait_until(lambda: set(turns(shared)) == set(MODELS))
    await asyncio.gather(*(complete(http, model, n) for n in range(8) for model in MODELS))
