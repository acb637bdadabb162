"""The figures of a service as JSON, which programs read."""

import json
import re
from dataclasses import asdict, fields
from datetime import UTC, datetime
from pathlib import Path

import pytest

import serve_app
from serve_app.cli.figures import Adapter, Figures, Model, Replica, Tenant, View
from serve_app.cli.reading import view
from serve_app.cli.stats_client import Poll
from tests.serve_app.cli.fake_service import llm

NOON = datetime(2026, 11, 1, 12, tzinfo=UTC)

REPORT = {"demo": {"replicas": [llm("a", queue_classes={1: (2, 10)}, tenants={"acme": 4})]}}


def shown() -> View:
    return view("http://service", Poll(0.0, NOON, {"models": REPORT}, {}), None)


def documented() -> dict[str, list[str]]:
    """Return the names in the README's tables about the JSON, by their object."""
    page = (Path(serve_app.__file__).parent / "README.md").read_text()
    _, _, section = page.partition("`--json` prints one object after one `--interval`:")
    objects, _, figures = section.partition("\n## ")[0].partition("`figures` of a model")
    found: dict[str, list[str]] = {"": []}
    for first, second in re.findall(r"^\| (`.*?) \| (.*) \|$", objects, re.MULTILINE):
        names = re.findall(r"`([^`]+)`", first)
        if names[0].endswith("[]"):
            # Text in parentheses explains a field.
            found[names[0]] = re.findall(r"`([^`]+)`", re.sub(r"\([^)]*\)", "", second))
        found[""] += [name.removesuffix("[]") for name in names if "." not in name]
    rows = re.findall(r"^\| (`.*?) \|", figures, re.MULTILINE)
    return found | {"figures": re.findall(r"`([^`]+)`", " ".join(rows))}


def test_the_fields_of_the_json_are_those_of_the_docs() -> None:
    body = asdict(shown())
    assert list(body) == ["url", "time", "interval_s", "models", "tenants", "batches"]
    assert body["time"] == "2026-11-01T12:00:00+00:00"
    (model,) = body["models"]
    assert list(model) == [
        "id",
        "state",
        "detail",
        "simulated",
        "ready_replicas",
        "figures",
        "replicas",
        "adapters",
    ]
    assert list(model["replicas"][0]) == ["replica", "statistics", "turn", "figures"]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("", View),
        ("models[]", Model),
        ("models[].replicas[]", Replica),
        ("models[].adapters[]", Adapter),
        ("tenants[]", Tenant),
        ("figures", Figures),
    ],
)
def test_the_docs_name_every_field(name: str, kind: type) -> None:
    assert sorted(documented()[name]) == sorted(field.name for field in fields(kind))


def test_a_view_is_json_as_it_is() -> None:
    body = asdict(shown())
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert body["models"][0]["figures"]["waiting_by_tier"] == {"flex": 2}
