"""Checks of every pod and every job."""

import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import click

from serve_app.dataset.command import batch
from serve_app.dataset.options import chosen
from serve_app.system import distribution
from tests.k8s.pods import Container, Pod, of_kind, pods
from tests.k8s.rendering import K8S, Document

VERSION = distribution.version()
OURS = re.compile(rf"saturate-(front|cpu|gpu):{re.escape(VERSION)}")
OTHERS = {"redis:7.2-alpine"}
ROOTS = [
    "ray/_private/ray_constants.py",
    "ray/serve/_private/constants.py",
    "ray/_common/usage/usage_constants.py",
    "huggingface_hub/constants.py",
    "huggingface_hub/utils/_auth.py",
    "serve_app/app.py",
]
"""Modules that read the variables that we set."""
TOKEN_VARIABLES = {"RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"}
KUBERAYS = {"app.kubernetes.io/name", "app.kubernetes.io/created-by"}
"""Labels that KubeRay gives pods, and finds them by."""
UPGRADES = {"None", "NewCluster", "NewClusterWithIncrementalUpgrade"}


def problems(documents: list[Document]) -> Iterator[str]:
    """Yield what is wrong, each with its path."""
    for pod in pods(documents):
        yield from _identity_and_rights(pod)
        yield from _volumes(pod, documents)
        for container in pod.containers:
            yield from _image(container)
            yield from _resources(container)
            yield from _environment(container)
    for budget in of_kind(documents, "PodDisruptionBudget"):
        yield from _selected(budget["spec"]["selector"]["matchLabels"], documents)
    for service in of_kind(documents, "RayService"):
        yield from _upgrade(service["spec"])
        yield from _token(service["spec"]["rayClusterConfig"], "spec.rayClusterConfig")
    for secret in of_kind(documents, "Secret"):
        yield f"Secret/{secret['metadata']['name']}: secrets are made by hand, not kept with the manifests"
    for job in of_kind(documents, "RayJob"):
        yield from _job(job["spec"])
        if cluster := job["spec"].get("rayClusterSpec"):
            yield from _token(cluster, "spec.rayClusterSpec")


def _identity_and_rights(pod: Pod) -> Iterator[str]:
    if pod.kind.startswith("Ray") and (taken := KUBERAYS & set(pod.labels)):
        yield f"{pod.path.removesuffix('.spec')}.metadata.labels: {sorted(taken)} are KubeRay's"
    context = pod.spec.get("securityContext", {})
    path = f"{pod.path}.securityContext"
    if context.get("runAsNonRoot") is not True or not context.get("runAsUser"):
        yield f"{path}: must say runAsNonRoot and a runAsUser"
    if context.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield f"{path}.seccompProfile: must be RuntimeDefault"
    for container in pod.containers:
        own = container.spec.get("securityContext", {})
        if own.get("allowPrivilegeEscalation") is not False or own.get("capabilities") != {"drop": ["ALL"]}:
            yield f"{container.path}.securityContext: must allow no escalation and drop all capabilities"
    if pod.group != "head" and pod.spec.get("automountServiceAccountToken") is not False:
        yield f"{pod.path}.automountServiceAccountToken: must be false"


def _volumes(pod: Pod, documents: list[Document]) -> Iterator[str]:
    templates = [
        t for d in of_kind(documents, "StatefulSet") for t in d["spec"].get("volumeClaimTemplates", [])
    ]
    claims = {claim["metadata"]["name"] for claim in of_kind(documents, "PersistentVolumeClaim")}
    volumes = {volume["name"] for volume in pod.spec.get("volumes", [])}
    volumes |= {template["metadata"]["name"] for template in templates}
    for container in pod.containers:
        mounts = container.spec.get("volumeMounts", [])
        for index, mount in enumerate(mounts):
            if mount["name"] not in volumes:
                yield f"{container.path}.volumeMounts[{index}].name: no volume {mount['name']!r}"
        if pod.kind == "RayService" and "/dev/shm" not in {mount["mountPath"] for mount in mounts}:
            yield f"{container.path}.volumeMounts: /dev/shm is missing"
    for index, volume in enumerate(pod.spec.get("volumes", [])):
        claim = volume.get("persistentVolumeClaim", {}).get("claimName")
        if claim and claim not in claims:
            yield f"{pod.path}.volumes[{index}].persistentVolumeClaim.claimName: no claim {claim!r}"


def _image(container: Container) -> Iterator[str]:
    image = container.spec["image"]
    if not OURS.fullmatch(image) and image not in OTHERS:
        yield f"{container.path}.image: {image!r} is none of the Dockerfile's, at version {VERSION}"


def _resources(container: Container) -> Iterator[str]:
    resources = container.spec.get("resources", {})
    for section in ("requests", "limits"):
        for name in ("cpu", "memory"):
            if name not in resources.get(section, {}):
                yield f"{container.path}.resources.{section}.{name}: missing"
    gpus = [resources.get(section, {}).get("nvidia.com/gpu") for section in ("requests", "limits")]
    if gpus[0] != gpus[1]:
        yield f"{container.path}.resources.limits: GPUs asked for and allowed must be the same"


def _environment(container: Container) -> Iterator[str]:
    readme = (K8S / "README.md").read_text()
    for name, (path, variable) in container.env.items():
        if name in TOKEN_VARIABLES:
            yield f"{path}.name: {name} comes from KubeRay; it leaves one that is here as it is"
            continue
        if not any(f'"{name}"' in text for text in _sources()) and name not in {
            "SATURATE_API_KEY",
            "REDIS_PASSWORD",
            # Compiled programs: NCCL, and Gloo in torch.
            "GLOO_SOCKET_IFNAME",
            "NCCL_SOCKET_IFNAME",
        }:
            yield f"{path}.name: {name} is read by no program"
        if secret := variable.get("valueFrom", {}).get("secretKeyRef"):
            command = f"create secret generic {secret['name']} --from-literal={secret['key']}="
            if command not in readme:
                yield f"{path}.valueFrom.secretKeyRef: k8s/README.md doesn't say how to make it: {command}"


def _sources() -> list[str]:
    found = []
    for root in ROOTS:
        package, _, rest = root.partition("/")
        spec = find_spec(package)
        assert spec is not None
        assert spec.origin is not None
        found.append((Path(spec.origin).parent / rest).read_text())
    return found


def _token(cluster: dict[str, Any], path: str) -> Iterator[str]:
    """Ray serves nobody without the token of KubeRay's Secret."""
    # KubeRay refuses Kubernetes' own tokens for services and jobs.
    if cluster.get("authOptions") != {"mode": "token"}:
        yield f"{path}.authOptions: must be {{mode: token}}"


def _selected(labels: dict[str, str], documents: list[Document]) -> Iterator[str]:
    if not any(
        (pod.labels | {"ray.io/group": pod.group}).items() >= labels.items() for pod in pods(documents)
    ):
        yield f"spec.selector.matchLabels: no pod has {labels}"


def _upgrade(spec: dict[str, Any]) -> Iterator[str]:
    # KubeRay checks these by itself, and not in its schema.
    strategy = spec.get("upgradeStrategy", {})
    if strategy.get("type") not in UPGRADES:
        yield f"spec.upgradeStrategy.type: must be one of {', '.join(sorted(UPGRADES))}"
    for name in ("maxSurgePercent", "stepSizePercent"):
        if not 0 < strategy.get("clusterUpgradeOptions", {}).get(name, 100) <= 100:
            yield f"spec.upgradeStrategy.clusterUpgradeOptions.{name}: must be a percentage"


def _job(spec: dict[str, Any]) -> Iterator[str]:
    selected = "clusterSelector" in spec
    if selected == ("rayClusterSpec" in spec):
        yield "spec.clusterSelector: either this or rayClusterSpec"
    if selected and spec.get("backoffLimit", 0) > 0:
        yield "spec.backoffLimit: must be 0: to try again, KubeRay deletes the cluster of the service"
    if spec.get("ttlSecondsAfterFinished") and not spec.get("shutdownAfterJobFinishes"):
        yield "spec.ttlSecondsAfterFinished: KubeRay wants shutdownAfterJobFinishes with it"
    command, _, rest = spec["entrypoint"].partition(" || ")
    if rest != "test $? -eq 3" or not command.startswith("saturate batch "):
        yield "spec.entrypoint: must run the driver, and take exit code 3 for success"
        return
    try:
        parsed = chosen(batch.make_context("batch", shlex.split(command)[2:]).params)
    except click.ClickException:
        yield "spec.entrypoint: the driver doesn't take these options"
        return
    if not str(parsed.output).startswith("/data/"):
        yield f"spec.entrypoint: the output must be on the volume, /data, not {parsed.output}"
    if parsed.url and parsed.url != "http://saturate-serve-svc:8000":
        yield f"spec.entrypoint: the service is at http://saturate-serve-svc:8000, not {parsed.url}"
    container = spec.get("rayClusterSpec", {}).get("headGroupSpec", {}).get("template", {}).get("spec", {})
    names = {v["name"] for c in container.get("containers", []) for v in c.get("env", [])}
    if parsed.api_key_env and parsed.api_key_env not in names:
        yield f"spec.entrypoint: no variable {parsed.api_key_env} in the container"
