"""Which pod reaches which port under the network policies, compared with what has to be so."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from tests.k8s.pods import of_kind, pods
from tests.k8s.rendering import Document

NAME = "kubernetes.io/metadata.name"
"""A label that Kubernetes gives every namespace, and nobody can change."""
APP = "app.kubernetes.io/name"
GATEWAY = "gateway.networking.k8s.io/gateway-name"
PART_OF, NODE = "app.kubernetes.io/part-of", "ray.io/node-type"

HERE = "team"
"""The namespace that the documents are applied to."""
NAMESPACES = {
    name: {NAME: name}
    for name in (HERE, "kuberay", "monitoring", "gateway", "kube-system", "clients", "elsewhere")
}
NAMESPACES["clients"]["saturate/clients"] = "true"

OTHERS = {
    "plain": {},
    "operator": {APP: "kuberay-operator"},
    "prometheus": {APP: "prometheus"},
    "grafana": {APP: "grafana"},
    "front gateway": {GATEWAY: "gateway"},
    "gateway": {GATEWAY: "saturate-gateway"},
    "another gateway": {GATEWAY: "another"},
    "client": {"saturate/client": "true"},
    "no client": {"saturate/client": "false"},
    "dns": {"k8s-app": "kube-dns"},
    "another head": {NODE: "head"},
}
"""Labels of pods that aren't ours. There is one of each in every namespace."""

DISGUISES = {
    "as the head": {PART_OF: "saturate", NODE: "head"},
    "as a batch pod": {PART_OF: "saturate", "saturate/batch": "saturate", NODE: "worker"},
    "as the driver": {PART_OF: "saturate-batch-http", NODE: "head"},
    "as redis": {APP: "saturate-redis"},
}
"""Labels of our pods. There is a pod with each in every other namespace."""

RAY = {6379, *range(10002, 65536)}
"""Ports with which the nodes of a Ray cluster talk: the GCS, workers, and the random ones."""
PORTS = [("TCP", port) for port in (22, 53, 6379, 8000, 8080, 8265, 10001, 10002)]
PORTS += [("TCP", port) for port in (30000, 44217, 44227, 52365, 65535)] + [("UDP", 53), ("UDP", 8000)]
"""Ports that are tried."""

CLUSTER = {"head", "cpu", "gpu", "batch", "cleanup"}
"""Roles of the pods of the service's cluster."""
BATCH = {"batch", "job"}
"""Roles of pods that may connect to the service only, and to what tells them its address."""


@dataclass(frozen=True)
class Place:
    """A pod, or an address outside of the cluster.

    Attributes:
        role: Role in `expected`; "stranger": none.
        kind: What it looks like.
        namespace: Its namespace; empty: outside of the cluster.
        labels: Its labels.
    """

    role: str
    kind: str
    namespace: str
    labels: Mapping[str, str] = field(default_factory=dict, compare=False)

    def __str__(self) -> str:
        return f"{self.kind} in {self.namespace}" if self.namespace else self.kind


def expected(source: Place, target: Place, protocol: str, port: int) -> bool:
    """Return whether a connection has to be possible; every other has to be impossible."""
    if source.role in BATCH and target.role == "dns":
        return port == 53
    if source.role in CLUSTER - BATCH and target.role in CLUSTER:
        return True
    if protocol != "TCP":
        return False
    allowed: set[int] = set()
    if target.role in CLUSTER:
        roles = {role: {8000} for role in ("client", "job", "front gateway", "gateway")}
        roles |= {"batch": RAY, "operator": {8000, 8265}, "prometheus": {8080, 44217, 44227}}
        allowed = roles.get(source.role, allowed)
    elif (source.role, target.role) == ("operator", "job"):
        allowed = {8265}
    elif source.role in {"head", "cleanup"} and target.role == "redis":
        allowed = {6379}
    return port in allowed


def problems(documents: list[Document]) -> Iterator[str]:
    """Yield the connections that the policies allow and should not, and those that they should and don't."""
    policies = of_kind(documents, "NetworkPolicy")
    for policy in policies:
        for problem in _form(policy["spec"]):
            yield f"NetworkPolicy/{policy['metadata']['name']}: {problem}"
    ours, others = _ours(documents), _others(documents)
    # Each side has to be right by itself. The pods of others are theirs to protect, and most of ours may
    # connect to everything.
    sides = [
        (source, target, "Ingress") for source in (*ours, *others) for target in ours if source != target
    ]
    batch = [place for place in ours if place.role in BATCH]
    sides += [
        (source, target, "Egress") for source in batch for target in (*ours, *others) if source != target
    ]
    outside = others[0]
    for place in ours:
        if place.role not in BATCH and len(_opened(policies, "Egress", place, outside)) < len(PORTS):
            yield f"NetworkPolicy: {place} doesn't reach {outside}"
    for source, target, direction in sides:
        pod, peer = (target, source) if direction == "Ingress" else (source, target)
        found = _opened(policies, direction, pod, peer)
        for protocol, port in PORTS:
            reaches = (protocol, port) in found
            if reaches != expected(source, target, protocol, port):
                verb = "reaches" if reaches else "doesn't reach"
                yield f"NetworkPolicy: {source} {verb} {protocol} port {port} of {target} ({direction})"


def _form(spec: dict[str, Any]) -> Iterator[str]:
    """Yield the peers that don't name pods, and a namespace if it is another one, in one element."""
    if not spec.get("podSelector"):
        yield "spec.podSelector: must name pods"
    for direction, key, peers in (("Ingress", "ingress", "from"), ("Egress", "egress", "to")):
        if (direction in spec.get("policyTypes", [])) != (key in spec):
            yield f"spec.policyTypes: must have {direction} if, and only if, there is {key}"
        for index, rule in enumerate(spec.get(key, [])):
            if not rule.get(peers):
                yield f"spec.{key}[{index}].{peers}: must name peers"
            for number, peer in enumerate(rule.get(peers, [])):
                path = f"spec.{key}[{index}].{peers}[{number}]"
                for name in ("podSelector", "namespaceSelector"):
                    if name in peer and not peer[name].get("matchLabels"):
                        yield f"{path}.{name}: must have matchLabels"
                if "podSelector" not in peer:
                    yield f"{path}: must name pods, in the same element as their namespace"


def _ours(documents: list[Document]) -> list[Place]:
    found = []
    for pod in pods(documents):
        role = "job" if pod.kind == "RayJob" else pod.group or "redis"
        node = "head" if pod.group == "head" else "worker"
        labels = pod.labels | ({NODE: node, "ray.io/group": pod.group} if pod.group else {})
        found.append(Place(role, role, HERE, labels))
        if role == "head" and of_kind(documents, "StatefulSet"):
            # With a copy of the head, KubeRay empties Redis when the cluster is deleted.
            found.append(Place("cleanup", "cleanup", HERE, labels | {NODE: "redis-cleanup"}))
    return found


def _others(documents: list[Document]) -> list[Place]:
    roles = {("kuberay", "operator"), (HERE, "client"), ("clients", "client"), ("kube-system", "dns")}
    if of_kind(documents, "PodMonitor"):
        roles.add(("monitoring", "prometheus"))
    if of_kind(documents, "HTTPRoute"):
        roles.add(("gateway", "front gateway"))
    for service in of_kind(documents, "RayService"):
        if "clusterUpgradeOptions" in service["spec"]["upgradeStrategy"]:
            roles.add((HERE, "gateway"))
    found = [Place("stranger", "an address outside of the cluster", "")]
    for namespace in NAMESPACES:
        for kind, labels in OTHERS.items():
            role = kind if (namespace, kind) in roles else "stranger"
            found.append(Place(role, kind, namespace, labels))
        if namespace != HERE:
            found += [Place("stranger", kind, namespace, labels) for kind, labels in DISGUISES.items()]
    return found


def _opened(policies: list[Document], direction: str, pod: Place, peer: Place) -> set[tuple[str, int]]:
    """Return the ports that a pod's policies of one direction open; without any, that is every port."""
    key, peers = ("ingress", "from") if direction == "Ingress" else ("egress", "to")
    specs = [
        policy["spec"]
        for policy in policies
        if direction in policy["spec"].get("policyTypes", ["Ingress"])
        and pod.namespace == HERE
        and _matches(policy["spec"]["podSelector"], pod.labels)
    ]
    found = set() if specs else set(PORTS)
    for spec in specs:
        for rule in spec.get(key, []):
            if not rule.get(peers) or any(_is_peer(selector, peer) for selector in rule[peers]):
                ports = rule.get("ports") or [{"protocol": "TCP"}, {"protocol": "UDP"}]
                found |= {port for port in PORTS if any(_has(opened, *port) for opened in ports)}
    return found


def _is_peer(selector: Mapping[str, Any], place: Place) -> bool:
    if "ipBlock" in selector or not place.namespace:
        return "ipBlock" in selector and not place.namespace
    if "namespaceSelector" in selector:
        inside = _matches(selector["namespaceSelector"], NAMESPACES[place.namespace])
    else:
        inside = place.namespace == HERE
    return inside and _matches(selector.get("podSelector", {}), place.labels)


def _matches(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    same = all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())
    return same and all(_holds(rule, labels) for rule in selector.get("matchExpressions", []))


def _holds(rule: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    value = labels.get(rule["key"])
    match rule["operator"]:
        case "In":
            return value in rule["values"]
        case "NotIn":
            return value not in rule["values"]
        case "Exists":
            return value is not None
        case "DoesNotExist":
            return value is None
    raise ValueError(f"unknown operator {rule['operator']}")


def _has(ports: Mapping[str, Any], protocol: str, port: int) -> bool:
    if ports.get("protocol", "TCP") != protocol:
        return False
    first = ports.get("port")
    return first is None or bool(first <= port <= ports.get("endPort", first))
