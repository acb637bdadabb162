"""The schema of the Gateway API's HTTPRoute, as far as it is used here, in the form that CRDs have.

Written by hand from https://gateway-api.sigs.k8s.io/reference/spec/; a field that is not here is unknown to
the checks, and has to be added with its type.
"""

from typing import Any

NAME = {"type": "string", "pattern": r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"}
DURATION = {"type": "string", "pattern": r"^([0-9]{1,5}(h|m|s|ms)){1,4}$"}


def _object(required: tuple[str, ...] = (), **properties: Any) -> dict[str, Any]:
    return {"type": "object", "required": list(required), "properties": properties}


def _list(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


PARENT = _object(("name",), name=NAME, namespace=NAME, sectionName=NAME)
MATCH = _object(
    path=_object(
        type={"type": "string", "enum": ["Exact", "PathPrefix", "RegularExpression"]},
        value={"type": "string"},
    )
)
RULE = _object(
    matches=_list(MATCH),
    timeouts=_object(request=DURATION, backendRequest=DURATION),
    backendRefs=_list(_object(("name",), name=NAME, port={"type": "integer", "minimum": 1})),
)
SCHEMA = _object(
    ("apiVersion", "kind", "metadata", "spec"),
    apiVersion={"type": "string", "enum": ["gateway.networking.k8s.io/v1"]},
    kind={"type": "string", "enum": ["HTTPRoute"]},
    metadata={"type": "object"},
    spec=_object(parentRefs=_list(PARENT), hostnames=_list(NAME), rules=_list(RULE)),
)
