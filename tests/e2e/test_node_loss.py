"""The loss of a whole node, in a cluster of three Ray nodes on this machine."""

import asyncio
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e import services
from tests.e2e.load import Load
from tests.e2e.nodes import Nodes
from tests.e2e.service import Service
from tests.e2e.services import local, use_exact_arithmetic

TIMES = 2

pytestmark = pytest.mark.long


@pytest.fixture
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(dict(os.environ))
    try:
        nodes.start_head({"front": 10})
        for name in ("a", "b"):
            nodes.add(name, {"engines": 2})
        yield nodes
    finally:
        for name in ("a", "b", "head"):
            nodes.lose(name)


@pytest.fixture
def cluster(nodes: Nodes, tmp_path: Path) -> Iterator[Service]:
    """A service with its front on the head and an Engine on each of the other nodes."""
    config, app, _ = local()
    use_exact_arithmetic(config)
    # One HAProxy: three of them can't have the same port of one machine.
    config["proxy_location"] = "HeadOnly"
    for deployment in app["deployments"]:
        engine = deployment["name"] != "Ingress"
        deployment["num_replicas"] = 2
        deployment["ray_actor_options"] = {"num_cpus": 0, "resources": {"engines" if engine else "front": 1}}
        if engine:
            deployment["max_replicas_per_node"] = 1
    service = Service(config, tmp_path, ray=nodes.address)
    yield service
    service.stop()


async def wait_for_replicas(service: Service, wanted: int) -> None:
    await asyncio.to_thread(services.wait_for_replicas, service, wanted)


async def test_clients_get_their_answers(nodes: Nodes, cluster: Service) -> None:
    await wait_for_replicas(cluster, 2)
    for number in range(TIMES):
        victim = "ab"[number % 2]
        load = Load(cluster.url)
        await load.learn()
        async with load.running():
            await load.wait_for(10)
            ended = await asyncio.to_thread(nodes.lose, victim)
            at = time.monotonic()
            await load.wait_for(20)
            await wait_for_replicas(cluster, 1)
        noticed = time.monotonic() - at
        nodes.add(victim, {"engines": 2})
        await wait_for_replicas(cluster, 2)
        print(
            f"loss of node {victim} ({ended} processes): noticed in {noticed:.1f} s, whole in "
            f"{time.monotonic() - at:.1f} s; {load.summary()}",
            flush=True,
        )
        assert load.failures() == []
