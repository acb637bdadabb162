"""A machine that vanishes: its power or its network failed, and no connection is closed."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.e2e.services import use_exact_arithmetic
from tests.k8s import machine
from tests.k8s.machine import Machine
from tests.k8s.operator import RayCluster
from tests.k8s.pods import of_kind
from tests.k8s.rendering import K8S, render
from tests.progress import finish, wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(machine.missing()), reason=f"pods need namespaces: {machine.missing()}"),
]


@pytest.fixture
def pods(tmp_path: Path) -> Iterator[Machine]:
    pods = Machine(tmp_path)
    yield pods
    pods.stop()


def with_engines(config: Any, count: int) -> Any:
    """Return the config with so many Engines, each on a node of its own."""
    changed = json.loads(json.dumps(config))
    use_exact_arithmetic(changed)
    for deployment in changed["applications"][0]["deployments"]:
        if deployment["name"].startswith("Engine:"):
            deployment |= {"num_replicas": count, "max_replicas_per_node": 1}
    return changed


def healthy(cluster: RayCluster) -> int:
    """Return how many Engines the service counts."""
    status, text = cluster.machine.ask(f"http://{cluster.workers[0].address}:8000/health", timeout_s=30)
    count: int = json.loads(text)["models"]["demo"]["replicas"] if status == 200 else 0
    return count


def wait_for_engines(cluster: RayCluster, count: int) -> float:
    """Wait until the service counts so many Engines; return the seconds that it took."""
    began = time.monotonic()
    wait_until(lambda: healthy(cluster) == count, every_s=0.5)
    return time.monotonic() - began


def test_clients_get_their_answers_when_an_engine_has_vanished(pods: Machine) -> None:
    (service,) = of_kind(render(K8S / "overlays" / "demo-cpu"), "RayService")
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    cluster = RayCluster(pods, service)
    # The Ingress is where the first Engine is.
    front = cluster.add("cpu")
    cluster.put(with_engines(config, 1))
    cluster.wait_for(front)
    victim = cluster.add("cpu")
    cluster.put(with_engines(config, 2))
    wait_for_engines(cluster, 2)
    assert set(cluster.replicas().values()) == {front.address, victim.address}
    clients = pods.program("tests.k8s.clients", f"http://{front.address}:8000")
    assert clients.stdout
    assert clients.stdin
    assert clients.stdout.readline() == "running\n"
    pods.unplug(victim)
    noticed = wait_for_engines(cluster, 1)
    clients.stdin.write("\n")
    clients.stdin.flush()
    summary, _ = finish(clients)
    print(f"an Engine vanished: Serve noticed in {noticed:.1f} s; {summary}", flush=True)
    assert clients.returncode == 0, summary
