"""The demo's overlay as a cluster on this machine: pods in namespaces, and Ray as KubeRay starts it.

SATURATE_IMAGE names the unpacked root of the image `cpu`: then the pods run from that, as its user.
"""

import dataclasses
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import machine
from tests.k8s.machine import IMAGE, Machine, Running
from tests.k8s.operator import END_S, RayCluster
from tests.k8s.pods import of_kind
from tests.k8s.rendering import K8S, REPOSITORY, Document, render, with_components
from tests.progress import wait_until

pytestmark = [
    pytest.mark.long,
    pytest.mark.skipif(bool(machine.missing()), reason=f"pods need namespaces: {machine.missing()}"),
]


def only(documents: list[Document], kind: str) -> Document:
    """Return the one document of a kind."""
    (found,) = of_kind(documents, kind)
    return found


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Document:
    """The demo's RayService, with the group that Ray jobs need."""
    folder = tmp_path_factory.mktemp("overlay")
    return only(render(with_components(K8S / "overlays" / "demo-cpu", ["batch-group"], folder)), "RayService")


@pytest.fixture(scope="module")
def config(service: Document) -> Any:
    """The config that KubeRay gives to Serve."""
    return yaml.safe_load(service["spec"]["serveConfigV2"])


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, service: Document, config: Any) -> Iterator[RayCluster]:
    """Its cluster, with a worker that is ready to serve."""
    pods = Machine(tmp_path_factory.mktemp("pods"))
    try:
        cluster = RayCluster(pods, service)
        worker = cluster.add("cpu")
        assert not worker.probe(pods, "readinessProbe"), "nothing is served there yet"
        cluster.put(config)
        cluster.wait_for(worker)
        pods.name("saturate-serve-svc", worker.address)
        cluster.replicas()
        yield cluster
    finally:
        pods.stop()


def ask(cluster: RayCluster, pod: Running) -> Any:
    """Ask the service through the HAProxy of a pod; return the results, or what came instead."""
    body = {"prompts": ["What is 47+28?"], "task_id": "rehearsal"}
    status, text = cluster.machine.ask(f"http://{pod.address}:8000/generate", body, timeout_s=60)
    return json.loads(text)["results"] if status == 200 else (status, text)


def test_the_worker_answers(cluster: RayCluster) -> None:
    assert ask(cluster, cluster.workers[0]) == ["75"]


def test_the_dashboard_asks_for_the_token(cluster: RayCluster) -> None:
    url = f"http://{cluster.head.address}:8265"
    job = {"entrypoint": "touch /tmp/ray/mine"}
    assert cluster.machine.ask(f"{url}/api/jobs/", job)[0] == 401
    wrong = {"x-ray-authorization": "Bearer mine"}
    assert cluster.machine.ask(f"{url}/api/jobs/", job, headers=wrong)[0] == 403
    # The kubelet's probes have no token.
    assert cluster.machine.ask(f"{url}/api/gcs_healthz")[0] == 200


def test_a_program_without_the_token_learns_nothing_from_ray(cluster: RayCluster) -> None:
    worker = cluster.workers[0]
    without = [variable for variable in worker.env if not variable.startswith("RAY_AUTH_")]
    stranger = dataclasses.replace(worker, env=without)
    command = ["timeout", "60", "ray", "list", "nodes"]
    assert cluster.head.address in worker.run(command).stdout
    done = stranger.run(command)
    assert done.returncode != 0
    assert cluster.head.address not in done.stdout


def test_no_replica_runs_on_the_head(cluster: RayCluster) -> None:
    assert set(cluster.replicas().values()) == {cluster.workers[0].address}


def test_limits_change_without_a_restart(cluster: RayCluster, config: Any) -> None:
    before = cluster.replicas()
    changed = json.loads(json.dumps(config))
    engine = only_named(changed["applications"][0]["deployments"], "Engine:demo")
    engine["user_config"] = {"batcher": {"max_running": 3}}
    cluster.put(changed)
    # A replica that takes in the change may be missing from one answer.
    wait_until(lambda: bounds(cluster) == [3])
    assert cluster.replicas() == before
    cluster.put(config)


def only_named(deployments: list[dict[str, Any]], name: str) -> dict[str, Any]:
    """Return the deployment of a name."""
    (found,) = [deployment for deployment in deployments if deployment["name"] == name]
    return found


def bounds(cluster: RayCluster) -> list[int]:
    """Return how many records may run in each Engine, as the service tells it."""
    _, text = cluster.machine.ask(f"http://{cluster.workers[0].address}:8000/stats")
    replicas = json.loads(text)["models"]["demo"]["replicas"]
    return [replica["batcher"]["max_running"] for replica in replicas]


def test_a_job_sends_a_dataset_over_http(cluster: RayCluster, tmp_path: Path) -> None:
    job, data = made_ready("http", tmp_path)
    own = RayCluster(cluster.machine, job, secrets={"key": "any"})
    # Its network policy.
    cluster.machine.block(own.head, cluster.workers[0], [(8000, 8000)])
    cluster.machine.block(own.head, cluster.head, [])
    assert [port for port in (6379, 8265) if connects(own.head, cluster.head, port)] == []
    assert [port for port in (8000, 52365) if connects(own.head, cluster.workers[0], port)] == [8000]
    try:
        own.run(job)
    finally:
        own.head.end(END_S)
    assert errors(data / "answers.jsonl") == [None] * 500


def test_a_job_sends_a_dataset_through_the_handle(cluster: RayCluster, tmp_path: Path) -> None:
    job, data = made_ready("handle", tmp_path)
    worker = cluster.add("batch")
    cluster.wait_for(worker)
    # The ports of its network policy.
    for pod in (cluster.head, cluster.workers[0]):
        cluster.machine.block(worker, pod, [(6379, 6379), (10002, 65535)])
    assert [port for port in (6379, 8265, 52365) if connects(worker, cluster.head, port)] == [6379, 52365]
    try:
        cluster.run(job)
    finally:
        cluster.remove(worker)
    assert errors(data / "answers-handle.jsonl") == [None] * 500


def connects(pod: Running, target: Running, port: int) -> bool:
    """Return whether a pod can connect to a port of another."""
    return pod.run(["bash", "-c", f"exec 3<>/dev/tcp/{target.address}/{port}"]).returncode == 0


def made_ready(name: str, folder: Path) -> tuple[Document, Path]:
    """Return a job, and where its volume is."""
    job = only(render(K8S / "jobs" / name), "RayJob")
    if IMAGE:
        return job, Path(f"{IMAGE}/data")
    # The files of the image, and a volume.
    spec = job["spec"]
    spec["entrypoint"] = spec["entrypoint"].replace("/opt/saturate", str(REPOSITORY / "serve_app/demo"))
    spec["entrypoint"] = spec["entrypoint"].replace("/data", str(folder))
    return job, folder


def errors(answers: Path) -> list[Any]:
    """Return the error of each row, None where there is a result; the file goes."""
    rows = [json.loads(line) for line in answers.read_text().splitlines()]
    answers.unlink()
    return [row["error"] for row in rows]


def test_a_worker_that_goes_hands_its_replicas_over(cluster: RayCluster) -> None:
    old, new = cluster.workers[0], cluster.add("cpu")
    command = list(old.container["lifecycle"]["preStop"]["exec"]["command"])
    if not IMAGE:
        command[:1] = ["bash", str(K8S / "drain.sh")]
    drained = threading.Event()

    def drain() -> None:
        old.run(command)
        drained.set()

    threading.Thread(target=drain, daemon=True).start()
    answers: list[list[str]] = []

    def ask_until_drained() -> bool:
        # Kubernetes' Service sends requests to pods that are ready.
        for pod in (old, new):
            if pod.probe(cluster.machine, "readinessProbe"):
                answers.append(ask(cluster, pod))
        return drained.is_set()

    wait_until(ask_until_drained, every_s=0.0)
    cluster.wait_for(new)
    took = cluster.remove(old)
    print(f"{len(answers)} answers meanwhile; the old pod took {took:.1f} s to end")
    assert answers
    assert all(answer == ["75"] for answer in answers)
    assert ask(cluster, new) == ["75"]
    assert set(cluster.replicas().values()) == {new.address}
