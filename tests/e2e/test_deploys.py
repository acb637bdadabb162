"""Changes of the config under a steady load: no request fails."""

import asyncio
import copy

import httpx
import pytest

from serve_app.api.protocol import JSON
from tests.e2e.load import Load
from tests.e2e.service import Service
from tests.e2e.services import engine, engines, is_settled, redeploy, wait_until
from tests.progress import ANSWER_S


async def replicas(service: Service, count: int) -> dict[str, JSON]:
    """Return the report of each Engine replica, once the change is complete and so many run."""

    def reports() -> list[JSON]:
        if not is_settled(service):
            return []
        stats = httpx.get(f"{service.url}/stats", timeout=ANSWER_S).json()
        found: list[JSON] = stats["models"]["demo"]["replicas"]
        return found if len(found) == count else []

    found = await asyncio.to_thread(wait_until, reports, news=service.news())
    return {one["replica"]: one for one in found}


async def change(service: Service, config: JSON, count: int) -> tuple[Load, dict[str, JSON]]:
    """Deploy a config under load; return the load and the reports of the replicas afterwards."""
    load = Load(service.url)
    await load.learn()
    async with load.running(streams=3, singles=1, lists=1):
        await load.wait_for(5)
        await asyncio.to_thread(service.deploy, config)
        # Until the old state can't be taken for the new one.
        await load.wait_for(5)
        reports = await replicas(service, count)
        await load.wait_for(5)
    print(load.summary(), flush=True)
    return load, reports


async def test_limits_change_without_a_restart(service: Service) -> None:
    count = engines(service.config)
    before = await replicas(service, count)
    limits = {"batcher": {"max_running": 48}}
    await asyncio.to_thread(redeploy, service, count, user_config=limits)
    after = await replicas(service, count)
    assert set(after) == set(before)
    assert {one["batcher"]["max_running"] for one in after.values()} == {48}


@pytest.mark.long
async def test_fewer_replicas_with_other_limits_and_weights_restart_nothing(pair: Service) -> None:
    before = await replicas(pair, 2)
    config = copy.deepcopy(pair.config)
    changed = engine(config)
    changed["num_replicas"] = 1
    changed["user_config"] = {"batcher": {"max_running": 8, "tenant_weights": {"a": 2.0}}}
    load, after = await change(pair, config, 1)
    assert load.failures() == []
    assert len(after) == 1
    assert set(after) < set(before)
    assert {one["batcher"]["max_running"] for one in after.values()} == {8}


@pytest.mark.long
async def test_a_new_version_of_the_engine_fails_nothing(pair: Service) -> None:
    before = await replicas(pair, 1)
    config = copy.deepcopy(pair.config)
    config["applications"][0]["args"]["models"][0]["engine"]["max_num_seqs"] = 32
    load, after = await change(pair, config, 2)
    assert load.failures() == []
    assert not set(after) & set(before)
    assert {one["batcher"]["max_running"] for one in after.values()} == {32}


@pytest.mark.long
async def test_new_replicas_of_the_ingress_fail_nothing(pair: Service) -> None:
    """Connections from before a change go through an HAProxy that knows the old replicas only."""
    load = Load(pair.url)
    await load.learn()
    for turn in range(4):
        config = copy.deepcopy(pair.config)
        deployments = config["applications"][0]["deployments"]
        ingress = next(one for one in deployments if one["name"] == "Ingress")
        ingress["ray_actor_options"] = {"num_cpus": 0.01 * (turn + 1)}
        async with load.running(streams=6, singles=2, lists=1):
            await load.wait_for(5)
            await asyncio.to_thread(pair.deploy, config)
            await load.wait_for(5)
            await replicas(pair, 2)
            # The connections of before the change are used once more.
            await load.wait_for(20)
    print(load.summary(), flush=True)
    assert load.failures() == []
