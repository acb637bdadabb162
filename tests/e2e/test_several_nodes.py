"""A model over several nodes of Ray: the same answers, and a replica that ends and comes back as a whole."""

import asyncio
import copy
import json
import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from serve_app.api.protocol import JSON
from tests.e2e.load import Load
from tests.e2e.nodes import AUTH, Nodes
from tests.e2e.service import Service
from tests.e2e.services import engine, is_settled, local, use_exact_arithmetic, wait_until
from tests.progress import Work, run

pytestmark = pytest.mark.long

NAMES = "abcd"
"""Nodes of which each has a stage of a replica: there is no other place."""

PARTS = ("NodeWorker", "EngineCore", "ServeReplica:llm:Engine")
"""Words of the processes of a replica."""

LOOK = """
import json, ray
from ray.util import placement_group_table
ray.init(address="auto", logging_level="ERROR")
names = {node["NodeID"]: name for node in ray.nodes() for name in "abcd" if name in node["Resources"]}
groups = [each for each in placement_group_table().values() if each["state"] != "REMOVED"]
print(json.dumps([[names.get(each["bundles_to_node_id"][index], "") for index in (0, 1)] for each in groups]))
"""
"""Prints the nodes of each replica: that of the engine, then the other one."""


@pytest.fixture(scope="module")
def nodes() -> Iterator[Nodes]:
    nodes = Nodes(dict(os.environ))
    try:
        nodes.start_head({"front": 10})
        for name in NAMES:
            nodes.add(name, {"engines": 1, name: 1})
        yield nodes
    finally:
        for name in (*NAMES, "head"):
            nodes.lose(name)


def config_of(count: int, parallel: int, stages: int) -> JSON:
    """Return a config with the front on the head.

    Args:
        count: Replicas of the demo model.
        parallel: Workers of a stage.
        stages: Stages; with one worker the replica is on one node.
    """
    config, app, model = local()
    use_exact_arithmetic(config)
    # One HAProxy: several can't have the same port of one machine.
    config["proxy_location"] = "HeadOnly"
    for deployment in app["deployments"]:
        deployment["ray_actor_options"] = {"num_cpus": 0, "resources": {"front": 1}}
    engine(config)["num_replicas"] = count
    engine(config)["ray_actor_options"] = {"num_cpus": 0}
    if parallel * stages == 1:
        engine(config)["ray_actor_options"]["resources"] = {"engines": 1}
        return config
    del model["engine"]["distributed_executor_backend"]
    model["engine"] |= {"tensor_parallel_size": parallel, "pipeline_parallel_size": stages}
    model["nodes"] = 2
    # A death is noticed by itself, not by an engine that makes no step.
    model["engine_hang_timeout_s"] = 600.0
    # The bundles that `nodes` makes have GPUs.
    engine(config)["placement_group_bundles"] = [{"CPU": 1, "engines": 1}] * 2
    return config


@pytest.fixture(scope="module")
def cluster(nodes: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    """Two replicas with a stage on each of two nodes."""
    service = Service(config_of(1, 1, 1), tmp_path_factory.mktemp("nodes"), ray=nodes.address)
    # The answers of one node, which those of several nodes are compared with.
    asyncio.run(Load(service.url).learn())
    service.config = change(nodes, service, config_of(2, 1, 2))
    yield service
    service.stop()
    assert [line for name in NAMES for line in parts(nodes, name)] == []
    assert places(nodes) == []


def change(nodes: Nodes, service: Service, wanted: JSON) -> JSON:
    """Deploy a config on the ports of a service, and return it once it runs."""
    config = copy.deepcopy(service.config)
    for name in ("args", "deployments"):
        config["applications"][0][name] = wanted["applications"][0][name]
    config["applications"][0]["args"]["batches"] = service.config["applications"][0]["args"]["batches"]
    service.deploy(config)
    wait_until(lambda: is_settled(service), news=work(nodes))
    wait_for_replicas(nodes, service, engine(config)["num_replicas"])
    return config


def work(nodes: Nodes) -> Work:
    """Return the progress of all nodes."""
    return Work(lambda: [pid for name in (*NAMES, "head") for pid in nodes.pids(name)])


def wait_for_replicas(nodes: Nodes, service: Service, count: int) -> None:
    """Wait until the service counts so many replicas."""

    def counted() -> bool:
        with suppress(httpx.TransportError, ValueError):
            found = httpx.get(f"{service.url}/health", timeout=30).json()
            return bool(found.get("models", {}).get("demo", {}).get("replicas") == count)
        return False

    wait_until(counted, news=work(nodes))


def parts(nodes: Nodes, name: str) -> list[str]:
    """Return the command lines of a node's processes that belong to replicas."""
    return [line for line in commands(nodes, name).values() if any(part in line for part in PARTS)]


def commands(nodes: Nodes, name: str) -> dict[int, str]:
    """Return the command lines of a node's processes by id."""
    found = {}
    for pid in nodes.pids(name):
        with suppress(OSError):
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return found


def places(nodes: Nodes) -> list[list[str]]:
    """Return the nodes of each replica: that of the engine, then the other one."""
    env = {**os.environ, **AUTH, "RAY_ADDRESS": nodes.address}
    done = run([sys.executable, "-c", LOOK], env=env)
    assert done.returncode == 0, done.stderr
    found: list[list[str]] = json.loads(done.stdout.splitlines()[-1])
    return sorted(found)


def is_whole(nodes: Nodes) -> bool:
    """Return whether each node has its part of a replica, and no part of a replica that has ended."""
    found = places(nodes)
    # A worker on each node; the engine and the replica on the first.
    wanted = {name: Counter(PARTS[:1] if far else PARTS) for each in found for far, name in enumerate(each)}
    there = {
        name: Counter(part for line in parts(nodes, name) for part in PARTS if part in line) for name in NAMES
    }
    return len(found) == 2 and there == wanted


class Death(NamedTuple):
    """The process or node that dies.

    Attributes:
        part: A word of the process; empty: the whole node.
        far: It is on the node without the engine.
    """

    part: str
    far: bool


@pytest.mark.parametrize(
    "death",
    [
        Death("NodeWorker", far=True),
        Death("NodeWorker", far=False),
        Death("EngineCore", far=False),
        Death("ServeReplica:llm:Engine", far=False),
        Death("", far=True),
        Death("", far=False),
    ],
    ids=["far worker", "near worker", "engine", "replica", "far node", "node of the engine"],
)
async def test_a_replica_ends_and_comes_back_as_a_whole(nodes: Nodes, cluster: Service, death: Death) -> None:
    await asyncio.to_thread(wait_until, lambda: is_whole(nodes), news=work(nodes))
    victim = places(nodes)[0][death.far]
    load = Load(cluster.url)
    await load.learn()
    async with load.running():
        await load.wait_for(10)
        at = time.monotonic()
        if death.part:
            (pid,) = [pid for pid, line in commands(nodes, victim).items() if death.part in line]
            os.kill(pid, signal.SIGKILL)
        else:
            await asyncio.to_thread(nodes.lose, victim)
        await load.wait_for(20)
    async with load.running(streams=1, singles=1, lists=0):
        if not death.part:
            nodes.add(victim, {"engines": 1, victim: 1})
        await asyncio.to_thread(wait_until, lambda: is_whole(nodes), news=work(nodes))
        await asyncio.to_thread(wait_for_replicas, nodes, cluster, 2)
        await load.wait_for(2)
    print(f"{death}: whole again in {time.monotonic() - at:.1f} s; {load.summary()}", flush=True)
    assert load.failures() == []


async def test_answers_of_two_workers_a_stage_are_those_of_one_node(nodes: Nodes, cluster: Service) -> None:
    cluster.config = await asyncio.to_thread(change, nodes, cluster, config_of(1, 2, 1))
    load = Load(cluster.url)
    await load.learn()
    async with load.running():
        await load.wait_for(20)
    assert load.failures() == []


async def test_a_model_scales_to_zero_and_back(nodes: Nodes, cluster: Service) -> None:
    wanted = config_of(1, 1, 2)
    del engine(wanted)["num_replicas"]
    engine(wanted)["autoscaling_config"] = {
        "min_replicas": 0,
        "initial_replicas": 0,
        "max_replicas": 1,
        "downscale_delay_s": 1,
        "downscale_to_zero_delay_s": 1,
    }
    config = copy.deepcopy(cluster.config)
    config["applications"][0]["deployments"] = wanted["applications"][0]["deployments"]
    config["applications"][0]["args"]["models"] = wanted["applications"][0]["args"]["models"]
    cluster.deploy(config)
    await asyncio.to_thread(wait_until, lambda: places(nodes) == [], news=work(nodes))
    assert all(parts(nodes, name) == [] for name in NAMES)
    # A request starts a replica and waits for it.
    load = Load(cluster.url)
    await load.learn()
    async with load.running(streams=1, singles=1, lists=0):
        await load.wait_for(2)
        assert len(places(nodes)) == 1
    assert load.failures() == []
