"""Makes the Helm chart, and renders it with Helm's own library, without a cluster."""

import functools
import tempfile
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s import helm
from tests.k8s.rendering import Document

needs_helm = pytest.mark.skipif(
    find_spec("helm_python") is None,
    reason="Helm's library isn't installed (helm-python-sdk, Linux on x86-64)",
)


_FOLDER = tempfile.TemporaryDirectory()


@functools.cache
def made() -> Path:
    """Return the folder of the chart, as `make generate` makes it."""
    folder = Path(_FOLDER.name, "chart")
    helm.write(folder)
    return folder


class ChartError(ValueError):
    """Helm refuses the values; the message is Helm's."""


def render_chart(values: Mapping[str, Any] | None = None, release: str = "saturate") -> list[Document]:
    """Return the documents of a release.

    Args:
        values: Values beside those of the chart.
        release: Name of the release.

    Raises:
        ChartError: The values are wrong.
    """
    return [
        document for path, text in _rendered(values, release).items() for document in _documents(path, text)
    ]


def notes(values: Mapping[str, Any] | None = None, release: str = "saturate") -> str:
    """Return what `helm install` prints."""
    (text,) = [text for path, text in _rendered(values, release).items() if path.endswith("NOTES.txt")]
    return text


def overlay_values(name: str) -> dict[str, Any]:
    """Return the values of an overlay."""
    found: dict[str, Any] = yaml.safe_load((made() / f"overlays/{name}.yaml").read_text())
    return found


def merged(*parts: Mapping[str, Any]) -> dict[str, Any]:
    """Return values with those of later parts in the place of earlier ones."""
    found: dict[str, Any] = {}
    for part in parts:
        for name, value in part.items():
            before = found.get(name)
            both = isinstance(value, Mapping) and isinstance(before, Mapping)
            found[name] = merged(before, value) if both and before is not None else value
    return found


def lint(values: Mapping[str, Any] | None = None) -> list[str]:
    """Return what `helm lint --strict` finds, without its advice."""
    from helm_python import chart

    report = chart.lint(made(), dict(values or {}), strict=True)
    # 1 is advice.
    return [*report["errors"], *(one["error"] for one in report["messages"] if one["severity"] > 1)]


def _rendered(values: Mapping[str, Any] | None, release: str) -> dict[str, str]:
    from helm_python.chart import Chart
    from helm_python.errors import HelmRenderError, HelmValuesError

    with Chart.load(made()) as chart:
        try:
            found: dict[str, str] = chart.render(dict(values or {}), name=release, namespace="team")
        except (HelmRenderError, HelmValuesError) as error:
            raise ChartError(str(error)) from None
    return found


def _documents(path: str, text: str) -> list[Document]:
    if not path.endswith(".yaml"):
        return []
    return [document for document in yaml.load_all(text, yaml.CSafeLoader) if document]
