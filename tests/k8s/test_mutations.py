"""Each check of the manifests finds its mistake, and names the path: one mistake for each check."""

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s import checks, schemas
from tests.k8s.rendering import JOBS, K8S, Document, render, with_components
from tests.k8s.schemas import needs_crds

pytestmark = needs_crds

Step = str | int
GPU, FRONT = "spec.rayClusterConfig.workerGroupSpecs[1]", "spec.rayClusterConfig.workerGroupSpecs[0]"
POD = "template.spec"
CONTAINER = f"{POD}.containers[0]"


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> list[Document]:
    """The overlay with a GPU, and every option."""
    options = ["redis", "incremental-upgrade", "batch-group", "api-keys", "http-route", "observability"]
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


WRONG: list[tuple[str, str, object]] = [
    ("RayService", f"{GPU}.maxReplicas", 3),
    ("RayService", f"{GPU}.replicas", 1),
    ("RayService", f"{GPU}.maxReplicas", "2"),
    ("RayService", f"{GPU}.rayStartParams.num-cpus", "6"),
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
    ("RayService", f"{GPU}.{CONTAINER}.resources.limits", {"cpu": "6", "memory": "24Gi"}),
    ("RayService", f"{GPU}.{CONTAINER}.env[0].value", "0"),
    ("RayService", f"{GPU}.{CONTAINER}.env[3].name", "HF_HUB"),
    ("RayService", f"{GPU}.{CONTAINER}.env[4].valueFrom.secretKeyRef.name", "saturate-hf"),
    ("RayService", f"{GPU}.{CONTAINER}.ports[0].containerPort", 8001),
    ("RayService", f"{GPU}.{CONTAINER}.readinessProbe.httpGet.port", "http"),
    ("RayService", f"{GPU}.{CONTAINER}.volumeMounts[1].name", "model"),
    ("RayService", f"{GPU}.{CONTAINER}.volumeMounts[0].mountPath", "/dev/sh"),
    ("RayService", f"{GPU}.{CONTAINER}.securityContext.allowPrivilegeEscalation", True),
    ("RayService", f"{GPU}.{CONTAINER}.env[2].value", "front"),
    ("RayService", f"{FRONT}.rayStartParams.resources", '{"ingress": 1}'),
    ("RayService", "spec.rayClusterConfig.authOptions.mode", "tokens"),
    ("RayService", f"{GPU}.{CONTAINER}.env[1].name", "RAY_AUTH_MODE"),
    ("NetworkPolicy", "spec.policyTypes", ["Egress"]),
    ("NetworkPolicy", "spec.ingress[1].from[0]", {"namespaceSelector": {"matchLabels": {"a": "b"}}}),
    ("NetworkPolicy", "spec.ingress[1].from[0].namespaceSelector", {}),
    ("PodDisruptionBudget", "spec.selector.matchLabels", {"ray.io/group": "ingress"}),
    ("PodDisruptionBudget", "spec.minAvailable", [1]),
    ("HTTPRoute", "spec.rules[0].timeouts.request", "15s"),
    ("HTTPRoute", "spec.rules[0].timeouts.request", "0 s"),
    ("HTTPRoute", "spec.rules[0].timeout", {"request": "0s"}),
    ("HTTPRoute", "spec.rules[0].backendRefs[0].name", "saturate"),
    ("HTTPRoute", "spec.parentRefs[0].name", 1),
    ("PrometheusRule", "spec.groups[1].rules[0].for", "2 minutes"),
    ("PrometheusRule", "apiVersion", "monitoring.coreos.com/v2"),
    ("PodMonitor/saturate-workers", "spec.podMetricsEndpoints[0].port", "as-metrics"),
    ("RayService", f"{GPU}.{CONTAINER}.imagePullPolice", "Always"),
    ("PodDisruptionBudget", "spec.minAvailables", 1),
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


def forget_the_resource(config: Any) -> None:
    (front,) = [d for d in config["applications"][0]["deployments"] if d["name"] == "Ingress"]
    front["ray_actor_options"] = {"num_cpus": 0.5}


def refuse_all(config: Any) -> None:
    config["applications"][0]["args"]["models"][0]["batcher"]["max_queue_size"] = -1


CONFIG: list[tuple[str, Callable[[Any], object]]] = [
    ("http_options.host", lambda config: config["http_options"].update(host="127.0.0.1")),
    ("max_queue_size", refuse_all),
    ("http_optionz", lambda config: config.update(http_optionz={})),
    ("serveConfigV2: a replica of Ingress may run on a pod of group gpu", forget_the_resource),
]


@pytest.mark.parametrize(("path", "change"), CONFIG, ids=[path for path, _ in CONFIG])
def test_a_config_that_the_cluster_does_not_fit_is_found(
    full: list[Document], path: str, change: Callable[[Any], object]
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
