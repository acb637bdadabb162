"""A mistake anywhere in the manifests is found, and named with its path."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import checks, schemas
from tests.k8s.rendering import JOBS, K8S, Document, render, with_components
from tests.k8s.schemas import needs_crds

pytestmark = needs_crds

Step = str | int
FREE = {
    "labels",
    "annotations",
    "matchLabels",
    "rayStartParams",
    "requests",
    "limits",
    "nodeSelector",
    "clusterSelector",
    "data",
}
"""Maps with free keys."""

GPU, FRONT = "spec.rayClusterConfig.workerGroupSpecs[1]", "spec.rayClusterConfig.workerGroupSpecs[0]"
POD = "template.spec"
CONTAINER = f"{POD}.containers[0]"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """The overlay with a GPU, and every option."""
    options = ["redis", "incremental-upgrade", "batch-group", "api-keys", "ingress", "observability"]
    return render(
        with_components(K8S / "overlays" / "qwen2.5-7b-l4", options, tmp_path_factory.mktemp("full"))
    )


@pytest.fixture(scope="module")
def jobs() -> dict[str, list[Document]]:
    return {folder.name: render(folder) for folder in JOBS}


def steps(path: str) -> list[Step]:
    """Return the names and indices of a path; in a name, a slash stands for a dot, and a bar for a slash."""
    found: list[Step] = []
    for part in path.replace("[", ".[").split("."):
        found.append(int(part[1:-1]) if part.startswith("[") else part.replace("/", ".").replace("|", "/"))
    return found


def put(document: Document, path: str, value: object) -> None:
    """Set the field at a path."""
    *before, last = steps(path)
    here: Any = document
    for step in before:
        here = here[step]
    here[last] = value


def changed(
    documents: list[Document], kind: str, path: str, value: object, name: str = "saturate"
) -> list[Document]:
    """Return a copy with one field set."""
    documents = copy.deepcopy(documents)
    (document,) = [d for d in documents if (d["kind"], d["metadata"]["name"]) == (kind, name)]
    put(document, path, value)
    return documents


def keys(value: object, path: tuple[Step, ...] = ()) -> Iterator[tuple[Step, ...]]:
    """Yield the path of every key that a schema knows."""
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from keys(item, (*path, index))
    if isinstance(value, dict):
        for name, item in value.items():
            if not path or path[-1] not in FREE:
                yield (*path, name)
            yield from keys(item, (*path, name))


def renamed(document: Document, path: tuple[Step, ...]) -> Document:
    """Return a copy with one key misspelt."""
    document = copy.deepcopy(document)
    here: Any = document
    for step in path[:-1]:
        here = here[step]
    here[f"{path[-1]}x"] = here.pop(path[-1])
    return document


IDENTITY = {("apiVersion",), ("kind",), ("metadata",), ("metadata", "name")}
"""The keys that name the schema of a document; without them there is nothing to check against."""


def test_a_misspelt_key_is_found_at_any_depth(full: list[Document], jobs: dict[str, list[Document]]) -> None:
    documents = [*full, *(document for found in jobs.values() for document in found)]
    tried = 0
    for document in documents:
        config = document.get("spec", {}).pop("serveConfigV2", None)
        for path in keys(document):
            # A name with a slash is a label.
            if path in IDENTITY or "/" in str(path[-1]):
                continue
            wrong = renamed(document, path)
            if document["apiVersion"].startswith("ray.io"):
                found = list(schemas.structural(schemas.crd(document["kind"], "v1"), wrong, ""))
                if path[0] == "metadata":
                    found = list(schemas.problems(wrong))
                assert any(f"{schemas.joined(path)}x: unknown field" in problem for problem in found), path
            else:
                found = list(schemas.problems(wrong))
                assert any(problem.startswith(schemas.joined(path[:-1])) for problem in found), path
            tried += 1
        if config is not None:
            document["spec"]["serveConfigV2"] = config
    assert tried > 400


def test_a_misspelt_key_of_the_serve_config_is_found(full: list[Document]) -> None:
    (service,) = [document for document in full if document["kind"] == "RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    tried = 0
    for path in keys(config):
        # Variables are compared with the containers' below.
        if "env_vars" in path or "runtime_env" in path[:-1]:
            continue
        # The names of custom resources are free; they are compared with the groups' below.
        if "resources" in path[:-1]:
            continue
        wrong = renamed(config, path)
        assert list(schemas.serve_config(yaml.safe_dump(wrong))), path
        tried += 1
    assert tried > 30


WRONG: list[tuple[str, str, object]] = [
    ("RayService", f"{GPU}.maxReplicas", 3),
    ("RayService", f"{GPU}.minReplicas", 1),
    ("RayService", f"{GPU}.replicas", 1),
    ("RayService", f"{FRONT}.maxReplicas", 2),
    ("RayService", f"{GPU}.maxReplicas", "2"),
    ("RayService", f"{GPU}.rayStartParams.num-cpus", "6"),
    ("RayService", f"{GPU}.rayStartParams.num-gpus", "2"),
    ("RayService", "spec.rayClusterConfig.headGroupSpec.rayStartParams.num-cpus", "2"),
    ("RayService", "spec.rayClusterConfig.rayVersion", "2.59.0"),
    ("RayService", "spec.rayClusterConfig.enableInTreeAutoscaling", False),
    ("RayService", "spec.rayClusterDeletionDelaySeconds", 60),
    ("RayService", "spec.upgradeStrategy.type", "NewClusterWithIncrementalUpgrades"),
    ("RayService", "spec.upgradeStrategy.clusterUpgradeOptions.stepSizePercent", 101),
    ("RayService", f"{GPU}.{POD}.terminationGracePeriodSeconds", 900),
    ("RayService", f"{GPU}.{POD}.securityContext.runAsNonRoot", False),
    ("RayService", f"{GPU}.template.metadata.labels", {"app.kubernetes.io/name": "saturate"}),
    ("RayService", f"{GPU}.{POD}.automountServiceAccountToken", True),
    ("RayService", f"{GPU}.{POD}.volumes[1].persistentVolumeClaim.claimName", "saturate-model"),
    ("RayService", f"{GPU}.{CONTAINER}.image", "saturate-gpu:latest"),
    ("RayService", f"{GPU}.{CONTAINER}.resources.limits.memory", "24GiB"),
    ("RayService", f"{GPU}.{CONTAINER}.resources.limits", {"cpu": "6", "memory": "24Gi"}),
    ("RayService", f"{GPU}.{CONTAINER}.env[0].value", "0"),
    ("RayService", f"{GPU}.{CONTAINER}.env[0].name", "RAY_SERVE_ENABLE_HAPROXY"),
    ("RayService", f"{GPU}.{CONTAINER}.env[4].value", "90"),
    ("RayService", f"{GPU}.{CONTAINER}.env[8].name", "HF_HUB"),
    ("RayService", f"{GPU}.{CONTAINER}.env[9].valueFrom.secretKeyRef.name", "saturate-hf"),
    ("RayService", f"{GPU}.{CONTAINER}.ports[0].containerPort", 8001),
    ("RayService", f"{GPU}.{CONTAINER}.ports[0].name", "http"),
    ("RayService", f"{GPU}.{CONTAINER}.readinessProbe.httpGet.port", "http"),
    ("RayService", f"{GPU}.{CONTAINER}.livenessProbe.httpGet.path", "/healthz"),
    ("RayService", f"{GPU}.{CONTAINER}.volumeMounts[1].name", "model"),
    ("RayService", f"{GPU}.{CONTAINER}.volumeMounts[0].mountPath", "/dev/sh"),
    ("RayService", f"{GPU}.{CONTAINER}.securityContext.allowPrivilegeEscalation", True),
    ("RayService", f"{FRONT}.rayStartParams.resources", r'"{\"front\": 1}"'),
    ("RayService", f"{GPU}.{CONTAINER}.env[7].name", "INGRESS_RESOURCE"),
    ("RayService", f"{GPU}.{CONTAINER}.env[7].value", "front"),
    ("RayService", f"{FRONT}.rayStartParams.resources", '{"ingress": 1}'),
    ("RayService", f"{GPU}.rayStartParams.resources", r'"{\"ingress\": 1}"'),
    ("RayService", "spec.rayClusterConfig.authOptions.mode", "disabled"),
    ("RayService", "spec.rayClusterConfig.authOptions.mode", "tokens"),
    ("RayService", "spec.rayClusterConfig.authOptions.enableK8sTokenAuth", True),
    ("RayService", "spec.rayClusterConfig.authOptions", {}),
    ("RayService", f"{GPU}.{CONTAINER}.env[6].name", "RAY_AUTH_MODE"),
    ("NetworkPolicy", "spec.policyTypes", ["Egress"]),
    ("NetworkPolicy", "spec.ingress[1].from[0]", {"namespaceSelector": {"matchLabels": {"a": "b"}}}),
    ("NetworkPolicy", "spec.ingress[1].from[0].namespaceSelector", {}),
    ("PodDisruptionBudget", "spec.selector.matchLabels", {"ray.io/group": "ingress"}),
    ("PodDisruptionBudget", "spec.minAvailable", [1]),
    ("Ingress", "metadata.annotations.nginx/ingress/kubernetes/io|proxy-read-timeout", "60"),
    ("Ingress", "metadata.annotations.nginx/ingress/kubernetes/io|proxy-body-size", "1m"),
    ("Ingress", "metadata.annotations.nginx/ingress/kubernetes/io|proxy-buffering", "on"),
    ("Ingress", "spec.rules[0].http.paths[0].backend.service.name", "saturate"),
    ("RayService", "spec.rayClusterConfig.gcsFaultToleranceOptions.redisAddress", "redis:6379"),
    ("RayService", "spec.rayClusterConfig.gcsFaultToleranceOptions.backend", "reddis"),
    ("RayService", "spec.rayClusterConfig.headGroupSpec.template.spec.containers[0].ports", []),
    ("PrometheusRule", "spec.groups[1].rules[0].for", "2 minutes"),
    ("PrometheusRule", "spec.groups[1].rules[0].labels.severity", 1),
    ("PrometheusRule", "apiVersion", "monitoring.coreos.com/v2"),
    ("PodMonitor/saturate-head", "spec.podMetricsEndpoints[1].port", "autoscaler-metrics"),
    ("PodMonitor/saturate-workers", "spec.podMetricsEndpoints[0].port", "as-metrics"),
    ("PodMonitor/saturate-workers", "spec.podMetricsEndpoints[0].interval", "10 s"),
]


@pytest.mark.parametrize(("kind", "path", "value"), WRONG, ids=lambda value: str(value)[-60:])
def test_a_wrong_value_is_named_with_its_path(
    full: list[Document], kind: str, path: str, value: object
) -> None:
    kind, _, name = kind.partition("/")
    found = checks.problems(changed(full, kind, path, value, name or "saturate"))
    # The field, or one of the two that hold it: a port is missed in its list, a variable in its container.
    places = [schemas.joined(steps(path)[:end]) for end in (None, -1, -2)]
    assert any(f"{place}:" in problem for place in places for problem in found), found


def deployment(config: Any) -> Any:
    """Return the engine's part of a config."""
    return config["applications"][0]["deployments"][1]


def shorten_hard_stop(config: Any) -> None:
    for section in (config["controller_options"], config["applications"][0]):
        section["runtime_env"]["env_vars"]["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] = "60"


def forget_the_resource(config: Any) -> None:
    (front,) = [d for d in config["applications"][0]["deployments"] if d["name"] == "Ingress"]
    front["ray_actor_options"] = {"num_cpus": 0.5}


def refuse_all(config: Any) -> None:
    config["applications"][0]["args"]["models"][0]["batcher"]["max_queue_size"] = -1


CONFIG: list[tuple[str, Callable[[Any], None]]] = [
    ("http_options.host", lambda config: config["http_options"].update(host="127.0.0.1")),
    ("containerPort", lambda config: config["http_options"].update(port=9000)),
    ("max_queue_size", refuse_all),
    ("maxReplicas", lambda config: deployment(config)["autoscaling_config"].update(max_replicas=5)),
    ("num-cpus", lambda config: deployment(config)["ray_actor_options"].update(num_cpus=6)),
    ("env[4]", shorten_hard_stop),
    ("serveConfigV2: a replica of Ingress may run on a pod of group gpu", forget_the_resource),
]


@pytest.mark.parametrize(("path", "change"), CONFIG, ids=[path for path, _ in CONFIG])
def test_a_config_that_the_cluster_does_not_fit_is_found(
    full: list[Document], path: str, change: Callable[[Any], None]
) -> None:
    (service,) = [document for document in full if document["kind"] == "RayService"]
    config = yaml.safe_load(service["spec"]["serveConfigV2"])
    change(config)
    found = checks.problems(changed(full, "RayService", "spec.serveConfigV2", yaml.safe_dump(config)))
    assert any(path in problem for problem in found), found


DRIVER = "saturate batch a {} || test $? -eq 3"
JOB: list[tuple[str, str, object]] = [
    ("handle", "spec.backoffLimit", 3),
    ("handle", "spec.ttlSecondsAfterFinished", 60),
    ("http", "spec.shutdownAfterJobFinishes", False),
    ("http", "spec.entrypoint", DRIVER.format("/data/b --urls x")),
    (
        "http",
        "spec.entrypoint",
        DRIVER.format("/tmp/b --url http://saturate-serve-svc:8000"),
    ),
    (
        "http",
        "spec.entrypoint",
        DRIVER.format("/data/b --url http://saturate:8000"),
    ),
    ("http", "spec.rayClusterSpec.headGroupSpec.template.spec.containers[0].env[0].name", "API_KEY"),
    ("http", "spec.rayClusterSpec.authOptions", {"mode": "disabled"}),
]


@pytest.mark.parametrize(("job", "path", "value"), JOB)
def test_a_wrong_job_is_found(jobs: dict[str, list[Document]], job: str, path: str, value: object) -> None:
    found = checks.problems(changed(jobs[job], "RayJob", path, value, f"saturate-batch-{job}"))
    near = {"spec.shutdownAfterJobFinishes": "spec.ttlSecondsAfterFinished"}.get(path, path)
    assert any(near in problem for problem in found), found


def test_a_secret_among_the_manifests_is_found(full: list[Document]) -> None:
    secret = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": {"name": "saturate-api-keys"},
        "stringData": {"keys.yaml": "[]"},
    }
    (problem,) = checks.problems([*full, secret])
    assert problem.startswith("Secret/saturate-api-keys: ")


def test_a_wrong_overlay_fails_with_the_path(tmp_path: Path) -> None:
    patch = [{"op": "replace", "path": "/spec/rayClusterConfig/workerGroupSpecs/1/maxReplicas", "value": 9}]
    folder = with_components(K8S / "overlays" / "qwen2.5-7b-l4", [], tmp_path)
    content = yaml.safe_load((folder / "kustomization.yaml").read_text())
    content["patches"] = [{"target": {"kind": "RayService"}, "patch": yaml.safe_dump(patch)}]
    (folder / "kustomization.yaml").write_text(yaml.safe_dump(content))
    (problem,) = checks.problems(render(folder))
    assert problem.startswith(f"{GPU}.maxReplicas: 9")
