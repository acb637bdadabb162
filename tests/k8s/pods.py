"""Finds the pods of a set of documents, and where each field of them is."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from tests.k8s.rendering import Document

RAY = {"RayService": "rayClusterConfig", "RayJob": "rayClusterSpec"}
"""The field of each kind that holds a cluster."""


@dataclass(frozen=True)
class Container:
    """A container, and where it is.

    Attributes:
        path: Where in the document.
        spec: The container.
    """

    path: str
    spec: dict[str, Any]

    @property
    def env(self) -> dict[str, tuple[str, dict[str, Any]]]:
        """The variables by name: where each is, and the variable."""
        variables = enumerate(self.spec.get("env", []))
        return {variable["name"]: (f"{self.path}.env[{i}]", variable) for i, variable in variables}

    @property
    def ports(self) -> dict[str, tuple[str, int]]:
        """The ports by name: where each is, and its number."""
        ports = enumerate(self.spec.get("ports", []))
        return {
            port["name"]: (f"{self.path}.ports[{i}].containerPort", port["containerPort"])
            for i, port in ports
        }


@dataclass(frozen=True)
class Pod:
    """A pod template, and where it is.

    Attributes:
        kind: That of its document.
        group: Name of the group of workers; "head", or "" outside of Ray.
        path: Where the pod's spec is in the document.
        labels: Those of the template.
        spec: The pod's spec.
    """

    kind: str
    group: str
    path: str
    labels: dict[str, str]
    spec: dict[str, Any]

    @property
    def containers(self) -> list[Container]:
        """Its containers."""
        containers = enumerate(self.spec["containers"])
        return [Container(f"{self.path}.containers[{i}]", spec) for i, spec in containers]


def cluster_spec(document: Document) -> dict[str, Any]:
    """Return the cluster of a RayService or RayJob; empty for a job in another one's cluster."""
    cluster: dict[str, Any] = document.get("spec", {}).get(RAY.get(document["kind"], ""), {})
    return cluster


def groups(document: Document) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield the groups of a RayService's or RayJob's cluster: name, path and group; the head's is "head"."""
    if cluster := cluster_spec(document):
        where = RAY[document["kind"]]
        yield "head", f"spec.{where}.headGroupSpec", cluster["headGroupSpec"]
        for index, group in enumerate(cluster.get("workerGroupSpecs", [])):
            yield group["groupName"], f"spec.{where}.workerGroupSpecs[{index}]", group


def pods(documents: list[Document]) -> Iterator[Pod]:
    """Yield the pods of all documents."""
    for document in documents:
        kind, spec = document["kind"], document.get("spec", {})
        if kind not in RAY and "template" in spec:
            yield _pod(kind, "", "spec", spec)
        for name, path, group in groups(document):
            yield _pod(kind, name, path, group)


def _pod(kind: str, group: str, path: str, owner: dict[str, Any]) -> Pod:
    template = owner["template"]
    return Pod(kind, group, f"{path}.template.spec", template["metadata"].get("labels", {}), template["spec"])


def of_kind(documents: list[Document], kind: str) -> list[Document]:
    """Return the documents of a kind."""
    return [document for document in documents if document["kind"] == kind]
