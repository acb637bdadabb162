"""The alerts fire when they should, the dashboard is current, and both speak of metrics that exist."""

import json
import re
import shutil
from pathlib import Path

import pytest

from k8s.dashboard.__main__ import dashboard, text
from serve_app.telemetry import catalogue
from tests.k8s.prometheus import (
    PROMTOOL,
    alerts,
    needs_prometheus,
    queries,
    rules,
    write_rules,
)
from tests.k8s.rendering import K8S
from tests.progress import run

TESTS = Path(__file__).parent / "alerts" / "alerts_test.yaml"
FOREIGN = {
    "ray_node_gpus_utilization",
    "ray_node_cpu_utilization",
    "ray_node_mem_used",
    "ray_node_mem_total",
    "ray_serve_autoscaling_target_replicas",
    "ray_serve_deployment_queued_queries",
    "ray_serve_replica_processing_queries",
    "autoscaler_pending_nodes",
}
"""Metrics of Ray itself."""


def promtool(*arguments: str, folder: Path) -> str:
    assert PROMTOOL
    done = run([PROMTOOL, *arguments], cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@needs_prometheus
def test_prometheus_takes_the_rules(tmp_path: Path) -> None:
    output = promtool("check", "rules", str(write_rules(tmp_path)), folder=tmp_path)
    assert f"SUCCESS: {len(rules())} rules found" in output


@needs_prometheus
def test_each_alert_fires_when_it_should(tmp_path: Path) -> None:
    write_rules(tmp_path)
    shutil.copy(TESTS, tmp_path)
    promtool("test", "rules", TESTS.name, folder=tmp_path)


def test_each_alert_is_tested() -> None:
    tested = set(re.findall(r"alertname: (\w+)", TESTS.read_text()))
    assert tested == set(alerts())


def test_each_alert_has_a_paragraph_and_each_paragraph_an_alert() -> None:
    headings = re.findall(r"^## (\w+)$", (K8S / "runbooks.md").read_text(), re.MULTILINE)
    assert headings == list(alerts())
    for name, alert in alerts().items():
        assert alert["annotations"]["runbook"] == f"k8s/runbooks.md#{name.lower()}"
        assert alert["annotations"]["summary"]
        assert alert["labels"]["severity"] in {"page", "ticket"}


def test_the_dashboard_asks_in_order() -> None:
    rows = [panel["title"] for panel in dashboard()["panels"] if panel["type"] == "row"]
    assert [row.split()[-1].strip("?") for row in rows] == [
        "happy",
        "full",
        "why",
        "it",
        "go",
        "failing",
        "say",
    ]


def test_panels_do_not_overlap_and_ids_differ() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    cells = [
        (x, y)
        for panel in panels
        for place in [panel["gridPos"]]
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(set(cells)) == len(cells)
    assert max(x for x, _ in cells) < 24


def names(expr: str) -> set[str]:
    """Return the metrics in an expression."""
    found = re.findall(r"\b((?:ray|autoscaler)_\w+)", expr)
    return {re.sub(r"_(bucket|count)$", "", name) for name in found}


@pytest.mark.parametrize(
    ("where", "expr"),
    [*queries("1m"), *((rule.get("alert") or rule["record"], rule["expr"]) for rule in rules())],
)
def test_every_metric_that_is_asked_for_exists(where: str, expr: str) -> None:
    ours = {metric.exported for metric in catalogue.ALL}
    assert names(expr) <= ours | FOREIGN


def test_no_query_uses_a_sum_that_ray_makes_up() -> None:
    for _, expr in queries("1m"):
        assert not re.search(r"_seconds_sum\b|_(records|cost)_sum\b", expr)


def test_every_recorded_series_that_is_asked_for_is_recorded() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    asked = {name for rule in rules() for name in re.findall(r"saturate:[\w:]+", rule["expr"])}
    assert asked <= recorded


def test_our_names_follow_prometheus() -> None:
    for metric in catalogue.ALL:
        assert re.fullmatch(r"(saturate|vllm)_[a-z0-9_]+", metric.name)
        assert metric.name.endswith("_total") == (metric.kind == "counter"), metric.name
        assert bool(metric.buckets) == (metric.kind == "histogram"), metric.name
        assert list(metric.buckets) == sorted(set(metric.buckets))
        assert not metric.help.endswith(".")


def test_the_slow_stream_of_the_alert_is_a_bucket() -> None:
    (bound,) = {found for rule in rules() for found in re.findall(r'le="([\d.]+)"', rule["expr"])}
    assert float(bound) in catalogue.FIRST_TOKEN.buckets


def test_the_dashboard_is_json_that_grafana_reads() -> None:
    content = json.loads(text())
    assert content["uid"] == "saturate"
    assert [variable["name"] for variable in content["templating"]["list"]] == [
        "datasource",
        "application",
        "model",
    ]
