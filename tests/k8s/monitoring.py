"""Schemas of the Prometheus operator's kinds, as far as they are used here, in the form that CRDs have.

Written by hand from https://prometheus-operator.dev/docs/api-reference/api/; a field that is not here is
unknown to the checks, and has to be added with its type.
"""

from collections.abc import Iterator
from typing import Any

from tests.k8s.pods import of_kind, pods
from tests.k8s.rendering import Document

STRING = {"type": "string"}
STRINGS = {"type": "array", "items": STRING}
MAP = {"type": "object", "additionalProperties": STRING}
DURATION = {
    "type": "string",
    "pattern": r"^(0|(([0-9]+)y)?(([0-9]+)w)?(([0-9]+)d)?(([0-9]+)h)?(([0-9]+)m)?(([0-9]+)s)?)$",
}
LABEL = {"type": "string", "pattern": r"^[a-zA-Z_][a-zA-Z0-9_]*$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


RELABELING = _object(
    sourceLabels={"type": "array", "items": LABEL},
    targetLabel=STRING,
    regex=STRING,
    replacement=STRING,
    separator=STRING,
    action={"type": "string", "enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
ENDPOINT = _object(
    ("port",),
    port=STRING,
    path=STRING,
    interval=DURATION,
    scrapeTimeout=DURATION,
    relabelings={"type": "array", "items": RELABELING},
    metricRelabelings={"type": "array", "items": RELABELING},
)
POD_MONITOR = _object(
    ("selector", "podMetricsEndpoints"),
    jobLabel=STRING,
    podTargetLabels=STRINGS,
    selector=_object(matchLabels=MAP),
    namespaceSelector=_object(any={"type": "boolean"}, matchNames=STRINGS),
    podMetricsEndpoints={"type": "array", "items": ENDPOINT},
)
RULE = _object(
    ("expr",),
    record=STRING,
    alert=STRING,
    expr={"x-kubernetes-int-or-string": True},
    labels=MAP,
    annotations=MAP,
    **{"for": DURATION, "keep_firing_for": DURATION},
)
GROUP = _object(("name", "rules"), name=STRING, interval=DURATION, rules={"type": "array", "items": RULE})
PROMETHEUS_RULE = _object(("groups",), groups={"type": "array", "items": GROUP})

SPECS = {"PodMonitor": POD_MONITOR, "PrometheusRule": PROMETHEUS_RULE}


def schema(document: Document) -> dict[str, Any]:
    """Return the schema of a document of the operator's.

    Raises:
        KeyError: There is none here for its kind.
    """
    return _object(
        ("apiVersion", "kind", "metadata", "spec"),
        apiVersion={"type": "string", "enum": ["monitoring.coreos.com/v1"]},
        kind=STRING,
        metadata={"type": "object"},
        spec=SPECS[document["kind"]],
    )


def problems(documents: list[Document]) -> Iterator[str]:
    """Yield the endpoints of monitors that name a port which no pod of theirs has."""
    found: dict[str, set[str]] = {"head": set(), "worker": set()}
    for pod in pods(documents):
        names = {name for container in pod.containers for name in container.ports}
        # KubeRay adds the port `metrics` to every pod.
        found["head" if pod.group == "head" else "worker"] |= names | {"metrics"}
    for document in of_kind(documents, "PodMonitor"):
        node = document["spec"]["selector"]["matchLabels"]["ray.io/node-type"]
        for index, endpoint in enumerate(document["spec"]["podMetricsEndpoints"]):
            if endpoint["port"] not in found[node]:
                place = f"PodMonitor/{document['metadata']['name']}: spec.podMetricsEndpoints[{index}].port"
                yield f"{place}: no {node} pod has a port {endpoint['port']!r}"
