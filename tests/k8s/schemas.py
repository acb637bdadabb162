"""Checks documents against schemas, and refuses every field that a schema doesn't have."""

import functools
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, get_args

import kubernetes_validate  # type: ignore[import-untyped]
import pytest
import yaml
from pydantic import BaseModel
from ray.serve.schema import ServeDeploySchema

from serve_app.settings.schema import SettingsError, parse
from tests.k8s import gateway, monitoring
from tests.k8s.rendering import REPOSITORY, Document

KUBERNETES = "1.34"
"""The version of Kubernetes for which objects are checked."""

CRDS = Path(os.environ.get("KUBERAY_CRDS", REPOSITORY.parent / "shared" / "kuberay-crds"))
"""The folder of KubeRay's CRDs: `helm pull kuberay/kuberay-operator --untar` has them in `crds/`."""

TYPES: dict[str, type | tuple[type, ...]] = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "integer": int,
    "number": (int, float),
}

needs_crds = pytest.mark.skipif(
    not CRDS.is_dir(), reason=f"KubeRay's CRDs are not in {CRDS}; set KUBERAY_CRDS to their folder"
)


# The library reads a megabyte of definitions anew for each document.
kubernetes_validate.utils.schema_contents = functools.cache(kubernetes_validate.utils.schema_contents)


@functools.cache
def crd(kind: str, version: str) -> dict[str, Any]:
    """Return the schema of a KubeRay kind."""
    text = (CRDS / f"ray.io_{kind.lower()}s.yaml").read_text()
    versions = yaml.load(text, yaml.CSafeLoader)["spec"]["versions"]
    schema: dict[str, Any] = next(v["schema"]["openAPIV3Schema"] for v in versions if v["name"] == version)
    return schema


def problems(document: Document) -> Iterator[str]:
    """Yield what is wrong with a document, each with its path."""
    group, _, version = document["apiVersion"].partition("/")
    if group in {"ray.io", "monitoring.coreos.com", "gateway.networking.k8s.io"}:
        metadata = {name: value for name, value in document["metadata"].items() if name != "name"}
        yield from unknown(metadata, {"labels", "annotations", "namespace"}, "metadata")
        if group == "ray.io":
            schema = crd(document["kind"], version)
        else:
            schema = gateway.SCHEMA if document["kind"] == "HTTPRoute" else monitoring.schema(document)
        yield from structural(schema, document, "")
    else:
        try:
            kubernetes_validate.validate(document, KUBERNETES, strict=True)
        except kubernetes_validate.ValidationError as error:
            yield f"{joined(error.path)}: {error.message}"
    if document["kind"] == "RayService":
        yield from serve_config(document["spec"].get("serveConfigV2", ""))


def structural(schema: dict[str, Any], value: object, path: str) -> Iterator[str]:
    """Check a value against a structural schema, as Kubernetes has them in CRDs.

    Args:
        schema: The schema.
        value: The value.
        path: Where the value is.
    """
    if value is None and schema.get("nullable"):
        return
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: must be a number or a string, not {value!r}"
    elif (kind := schema.get("type")) and not _is(value, kind):
        yield f"{path}: must be of type {kind}, not {value!r}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: must be one of {', '.join(map(repr, schema['enum']))}, not {value!r}"
    if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
        yield f"{path}: must match {schema['pattern']}, not {value!r}"
    if isinstance(value, int) and value < schema.get("minimum", value):
        yield f"{path}: must be {schema['minimum']} or more, not {value!r}"
    if isinstance(value, list):
        for index, item in enumerate(value):
            yield from structural(schema["items"], item, f"{path}[{index}]")
    if isinstance(value, dict):
        yield from _object(schema, value, path)


def _object(schema: dict[str, Any], value: dict[str, object], path: str) -> Iterator[str]:
    for name in schema.get("required", []):
        if name not in value:
            yield f"{_under(path, name)}: required"
    fields = schema.get("properties", {})
    others = schema.get("additionalProperties")
    # `metadata` of the document itself has no schema in a CRD; Kubernetes checks it by itself.
    free = schema.get("x-kubernetes-preserve-unknown-fields") or path == "metadata"
    for name, item in value.items():
        if name in fields:
            yield from structural(fields[name], item, _under(path, name))
        elif isinstance(others, dict):
            yield from structural(others, item, _under(path, name))
        elif not others and not free:
            yield f"{_under(path, name)}: unknown field"


def _is(value: object, kind: str) -> bool:
    if isinstance(value, bool):
        return kind == "boolean"
    return isinstance(value, TYPES[kind])


def _under(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def joined(path: object) -> str:
    """Return a path of names and indices as text."""
    assert hasattr(path, "__iter__")
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path).lstrip(".")


def unknown(value: dict[str, Any], allowed: set[str], path: str) -> Iterator[str]:
    """Yield the keys that aren't allowed."""
    for name in value:
        if name not in allowed:
            yield f"{_under(path, name)}: unknown field"


def serve_config(text: str) -> Iterator[str]:
    """Check a Serve config: Serve's part with Serve's schema, the args of our application with ours."""
    path = "spec.serveConfigV2"
    try:
        content = yaml.safe_load(text)
        config = ServeDeploySchema.model_validate(content)
        # Serve itself passes over what it doesn't know, and so over a typo.
        yield from _unknown_keys(ServeDeploySchema, content, path)
        for app in config.applications:
            parse(app.args)
    except (yaml.YAMLError, SettingsError, ValueError) as error:
        yield f"{path}: {error}"


def _unknown_keys(model: type[BaseModel], value: dict[str, Any], path: str) -> Iterator[str]:
    yield from unknown(value, set(model.model_fields), path)
    for name, field in model.model_fields.items():
        item = value.get(name)
        for inner in _models(field.annotation):
            if isinstance(item, dict):
                yield from _unknown_keys(inner, item, _under(path, name))
            if isinstance(item, list):
                for index, element in enumerate(item):
                    yield from _unknown_keys(inner, element, f"{_under(path, name)}[{index}]")


def _models(annotation: object) -> list[type[BaseModel]]:
    """Return the pydantic models in an annotation."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    return [model for argument in get_args(annotation) for model in _models(argument)]
