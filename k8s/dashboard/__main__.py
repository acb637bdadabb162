"""Prints the Grafana dashboard as JSON: python -m k8s.dashboard"""

import json
import os
from pathlib import Path
from typing import Any

from k8s.dashboard.panel import Panel
from k8s.dashboard.rows import batches, device, engine, failures, queue, tenants, users
from serve_app.telemetry.catalogue import RUNNING_RECORDS

ROWS = (users.ROW, device.ROW, queue.ROW, tenants.ROW, batches.ROW, failures.ROW, engine.ROW)
"""The rows, from what users see to what the engine reports."""

DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
WIDTH, HEIGHT = 8, 8
"""Of a panel, in Grafana's units: a row is 24 wide."""


def dashboard() -> dict[str, Any]:
    """Return the dashboard as Grafana imports it."""
    panels: list[dict[str, Any]] = []
    top = 0
    for row in ROWS:
        place = {"x": 0, "y": top, "w": 24, "h": 1}
        panels.append(
            {
                "type": "row",
                "title": row.title,
                "collapsed": False,
                "gridPos": place,
                "id": len(panels) + 1,
                "panels": [],
            }
        )
        top += 1
        for index, panel in enumerate(row.panels):
            place = {
                "x": index * WIDTH % 24,
                "y": top + index * WIDTH // 24 * HEIGHT,
                "w": WIDTH,
                "h": HEIGHT,
            }
            panels.append(_panel(panel, place, len(panels) + 1))
        top += -(-len(row.panels) * WIDTH // 24) * HEIGHT
    return {
        "uid": "saturate",
        "title": "saturate",
        "tags": ["saturate", "ray", "vllm"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 1,
        "editable": True,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [_datasource(), _variable("application"), _variable("model")]},
        "annotations": {"list": []},
        "panels": panels,
    }


def _panel(panel: Panel, place: dict[str, int], id: int) -> dict[str, Any]:
    defaults: dict[str, Any] = {
        "unit": panel.unit,
        "min": 0,
        "custom": {"fillOpacity": 8, "lineWidth": 1, "showPoints": "never", "spanNulls": True},
    }
    if panel.most is not None:
        defaults["max"] = panel.most
    targets = [
        {"refId": chr(ord("A") + n), "datasource": DATASOURCE, "expr": q.expr, "legendFormat": q.legend}
        for n, q in enumerate(panel.queries)
    ]
    return {
        "type": "timeseries",
        "title": panel.title,
        "description": panel.help,
        "id": id,
        "gridPos": place,
        "datasource": DATASOURCE,
        "targets": targets,
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "options": {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        },
    }


def _datasource() -> dict[str, Any]:
    return {"name": "datasource", "type": "datasource", "query": "prometheus", "label": "Prometheus"}


def _variable(label: str) -> dict[str, Any]:
    return {
        "name": label,
        "label": label,
        "type": "query",
        "datasource": DATASOURCE,
        "query": f"label_values({RUNNING_RECORDS.exported}, {label})",
        "includeAll": True,
        "allValue": ".*",
        "multi": True,
        "current": {"text": "All", "value": "$__all"},
        "refresh": 2,
        "sort": 1,
    }


def text() -> str:
    """Return the dashboard as the file that Grafana imports."""
    return json.dumps(dashboard(), indent=1) + "\n"


def write_dashboard() -> None:
    """Write the file of k8s/components/observability, whole at any moment."""
    path = Path(__file__).parents[1] / "components/observability/dashboard.json"
    new = path.with_name(f".{os.getpid()}.json")
    new.write_text(text())
    new.replace(path)


if __name__ == "__main__":
    print(text(), end="")
