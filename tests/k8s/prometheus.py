"""The rules for Prometheus and the queries of the dashboard."""

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.dashboard.__main__ import dashboard
from tests.k8s.rendering import K8S

OBSERVABILITY = K8S / "components" / "observability"
PROMETHEUS = shutil.which("prometheus")
PROMTOOL = shutil.which("promtool")

needs_prometheus = pytest.mark.skipif(
    not (PROMETHEUS and PROMTOOL),
    reason="Prometheus isn't installed (Debian's package `prometheus` has it and promtool)",
)


def rules() -> list[dict[str, Any]]:
    """Return every rule, recording and alerting."""
    document = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
    return [rule for group in document["spec"]["groups"] for rule in group["rules"]]


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    return {rule["alert"]: rule for rule in rules() if "alert" in rule}


def write_rules(folder: Path) -> Path:
    """Write the rules as Prometheus reads them, without what is the operator's, and return the file."""
    document = yaml.safe_load((OBSERVABILITY / "rules.yaml").read_text())
    path = folder / "rules.yaml"
    path.write_text(yaml.safe_dump(document["spec"], sort_keys=False))
    return path


def queries(interval: str) -> Iterator[tuple[str, str]]:
    """Yield the queries of the dashboard, each with its panel's title and its legend.

    Args:
        interval: What stands for Grafana's `$__rate_interval`.
    """
    for panel in dashboard()["panels"]:
        for target in panel.get("targets", ()):
            expr = target["expr"].replace("$__rate_interval", interval)
            for variable in ("$application", "$model"):
                expr = expr.replace(variable, ".*")
            yield f"{panel['title']}: {target['legendFormat']}", expr
