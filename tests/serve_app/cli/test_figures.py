"""The figures of a service, from its statistics at two times."""

import io
import json
import re
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

import serve_app
from batcher import BatchStats
from serve_app.cli.figures import (
    AdapterFigures,
    Figures,
    ModelFigures,
    Poll,
    ReplicaFigures,
    TenantFigures,
    View,
    view,
)
from serve_app.cli.picture import picture
from tests.serve_app.cli.fake_service import llm, polled


def replicas(*entries: Any) -> dict[str, Any]:
    return {"replicas": list(entries)}


def look(now: Poll, before: Poll | None = None) -> View:
    return view("http://service", now, before)


def only(now: Poll, before: Poll | None = None) -> ModelFigures:
    (model,) = look(now, before).models
    return model


def test_gauges_of_one_replica() -> None:
    entry = llm(
        "a",
        running=5,
        running_cost=30_000,
        queue_depth=7,
        queue_classes={-1: (1, 10), 0: (2, 20), 1: (4, 40), 9: (0, 0)},
        wait_p50_s=0.5,
        wait_p99_s=2.5,
        ttft_p50_s=0.1,
        ttft_p99_s=0.3,
        total_completed=11,
        total_rejected=3,
    )
    entry["goals"] = {"ttft_p99_s": 0.5}
    found = only(polled(0.0, {"demo": replicas(entry)})).figures
    assert (found.running, found.max_running, found.waiting) == (5, 64, 7)
    assert found.waiting_by_tier == {"priority": 1, "default": 2, "flex": 4}
    assert (found.kv_tokens, found.kv_capacity, found.kv_used) == (30_000, 100_000, 0.3)
    assert (found.wait_p50_s, found.wait_p99_s) == (0.5, 2.5)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (0.1, 0.3)
    assert found.ttft_goal_s == 0.5
    assert (found.completed, found.rejected, found.failed) == (11, 3, 0)
    # Rates need a second look.
    assert (found.output_tokens_per_s, found.busy, found.requests_per_s) == (None, None, None)


def test_rates_are_differences_between_two_looks() -> None:
    before = polled(10.0, {"demo": replicas(llm("a", out=100, total_completed=5, busy_time_s=1.0))})
    now = polled(12.0, {"demo": replicas(llm("a", out=500, total_completed=6, busy_time_s=2.5))})
    found = only(now, before).figures
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s) == (200.0, 400.0)
    assert (found.requests_per_s, found.busy) == (0.5, 0.75)
    assert look(now, before).interval_s == 2.0


def test_tokens_of_an_engine_without_counters_are_those_of_its_batcher() -> None:
    def entry(tokens: int) -> Any:
        made = llm("a", output_tokens=tokens)
        del made["usage"]["engine"]
        return made

    found = only(
        polled(2.0, {"demo": replicas(entry(50))}), polled(0.0, {"demo": replicas(entry(10))})
    ).figures
    assert (found.output_tokens_per_s, found.prompt_tokens_per_s) == (20.0, None)


def test_a_replica_that_has_only_just_come_has_no_rate_and_the_others_keep_theirs() -> None:
    before = polled(0.0, {"demo": replicas(llm("a", out=100))})
    now = polled(1.0, {"demo": replicas(llm("a", out=150), llm("b", out=9_000))})
    model = only(now, before)
    assert [one.figures.output_tokens_per_s for one in model.replicas] == [50.0, None]
    assert model.figures.output_tokens_per_s == 50.0


def test_a_counter_that_begins_anew_is_no_negative_rate() -> None:
    before, now = (polled(at, {"demo": replicas(llm("a", out=out))}) for at, out in ((0.0, 500), (1.0, 20)))
    assert only(now, before).figures.output_tokens_per_s == 0.0


def test_a_model_sums_its_replicas_and_takes_the_slowest_percentiles() -> None:
    entries = (
        llm("a", running=2, queue_depth=1, queue_classes={0: (1, 5)}, ttft_p99_s=0.2, wait_p99_s=1.0),
        llm("b", running=3, queue_depth=4, queue_classes={0: (3, 5), 1: (1, 1)}, running_cost=75_000),
    )
    found = only(polled(0.0, {"demo": replicas(*entries)})).figures
    assert (found.running, found.max_running, found.waiting) == (5, 128, 5)
    assert found.waiting_by_tier == {"default": 4, "flex": 1}
    assert (found.kv_tokens, found.kv_used) == (100_000, 0.5)
    assert (found.ttft_p99_s, found.wait_p99_s) == (0.2, 1.0)


def test_a_replica_without_a_bound_leaves_the_model_without_one() -> None:
    entries = llm("a"), llm("b", max_running=None)
    assert only(polled(0.0, {"demo": replicas(*entries)})).figures.max_running is None


def test_a_function_has_no_kv_cache_and_no_tokens() -> None:
    entry = {"replica": "f", "batcher": asdict(BatchStats(running=2, total_completed=8))}
    later = {"replica": "f", "batcher": asdict(BatchStats(running=2, total_completed=12))}
    found = only(polled(2.0, {"minilm": replicas(later)}), polled(0.0, {"minilm": replicas(entry)})).figures
    assert (found.running, found.requests_per_s) == (2, 2.0)
    assert (found.kv_tokens, found.kv_capacity, found.kv_used, found.output_tokens_per_s) == (None,) * 4


@pytest.mark.parametrize("entry", [{"replica": "b"}, {"replica": "b", "batcher": None}])
def test_a_replica_without_statistics_is_one_of_the_model_all_the_same(entry: Any) -> None:
    model = only(polled(0.0, {"demo": replicas(llm("a", running=4), entry)}))
    assert [one.statistics for one in model.replicas] == [True, False]
    assert (model.state, model.figures.running, model.figures.max_running) == ("ready", 4, 64)


STATES = [
    ({"replicas": [], "error": "a replica stopped"}, None, ("error", "a replica stopped")),
    ({"replicas": []}, None, ("asleep", "")),
    ({"replicas": []}, {"state": "asleep", "replicas": 0}, ("asleep", "")),
    ({"replicas": []}, {"state": "starting", "awaits": "a GPU"}, ("starting", "a GPU")),
    # The replica has come since Ray Serve was asked.
    ({"replicas": []}, {"state": "ready", "replicas": 1}, ("starting", "")),
    ({"replicas": [llm("a")]}, {"state": "ready", "replicas": 1}, ("ready", "")),
    ({"replicas": [llm("a")]}, None, ("ready", "")),
]


@pytest.mark.parametrize(("report", "health", "state"), STATES)
def test_the_state_of_a_model(report: Any, health: Any, state: tuple[str, str]) -> None:
    model = only(polled(0.0, {"demo": report}, {"demo": health} if health else None))
    assert (model.state, model.detail) == state


@pytest.mark.parametrize(
    ("turns", "state"),
    [
        (["awake"], "ready"),
        (["draining"], "ready"),
        (["asleep", "awake"], "ready"),
        (["asleep"], "asleep"),
        (["asleep", "failed"], "asleep"),
        (["waking", "asleep"], "starting"),
        (["loading"], "starting"),
        (["failed"], "failed"),
    ],
)
def test_the_state_of_a_model_that_takes_turns(turns: list[str], state: str) -> None:
    entries = [
        llm(str(number)) | {"turn": {"group": "gpu", "state": turn, "turns": 2, "cause": "no memory"}}
        for number, turn in enumerate(turns)
    ]
    model = only(polled(0.0, {"demo": replicas(*entries)}))
    assert model.state == state
    assert model.detail == ("no memory" if state == "failed" else "")
    assert [one.turn.state for one in model.replicas if one.turn] == turns


def test_a_simulated_model_says_so_and_replicas_that_are_missing_show() -> None:
    health = {"demo": {"state": "ready", "replicas": 3, "simulated": "h100-8b"}}
    model = only(polled(0.0, {"demo": replicas(llm("a"))}, health))
    assert (model.simulated, model.ready_replicas, len(model.replicas)) == ("h100-8b", 3, 1)


def test_adapters_are_counted_over_the_replicas() -> None:
    def entry(name: str, *resident: str) -> Any:
        listed = [{"id": id, "resident": id in resident} for id in ("words", "german")]
        return llm(name) | {"adapters": listed}

    words, german = only(
        polled(0.0, {"demo": replicas(entry("a", "words"), entry("b", "words", "german"))})
    ).adapters
    assert (words.id, words.replicas, words.resident) == ("words", 2, 2)
    assert (german.id, german.replicas, german.resident) == ("german", 2, 1)


def test_tenants_are_summed_over_models_and_sorted_by_their_tokens() -> None:
    def models(acme: int, bits: int) -> Any:
        return {
            "demo": replicas(llm("a", tenants={"acme": acme, "bits": bits}), llm("b", tenants={"acme": 10})),
            "other": replicas(llm("c", tenants={"acme": 5})),
        }

    now, before = polled(2.0, models(100, 60)), polled(0.0, models(90, 0))
    bits, acme = look(now, before).tenants
    assert (bits.tenant, bits.tokens_per_s, bits.output_tokens) == ("bits", 30.0, 60)
    assert (acme.tenant, acme.tokens_per_s, acme.output_tokens) == ("acme", 5.0, 115)
    assert (acme.calls, acme.prompt_tokens, acme.cached_tokens) == (6, 120, 24)
    first, _ = look(now).tenants
    assert (first.tenant, first.tokens_per_s) == ("acme", None)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5)
anything = scalars | st.lists(scalars, max_size=3) | st.dictionaries(st.text(max_size=5), scalars, max_size=3)
entries = st.fixed_dictionaries(
    {},
    optional={
        "replica": anything,
        "batcher": st.dictionaries(
            st.sampled_from(
                ["running", "queue_depth", "queue_classes", "capacity", "running_cost", "wait_p99_s"]
            ),
            anything,
        ),
        "usage": st.fixed_dictionaries({}, optional={"tenants": anything, "engine": anything}),
        "turn": anything,
        "adapters": anything,
    },
)


@given(st.lists(entries, max_size=3), st.lists(entries, max_size=3), anything, anything)
def test_a_service_of_another_version_breaks_nothing(
    now: Any, before: Any, health: Any, batches: Any
) -> None:
    """Entries are missing or mean something else; the figures that are there are shown."""
    later = polled(1.0, {"m": replicas(*now)}, {"m": health}, batches=batches)
    console = Console(file=io.StringIO(), width=100)
    console.print(picture(look(later, polled(0.0, {"m": replicas(*before)})), console))


# JSON, which programs read

REPORT = {"demo": {"replicas": [llm("a", queue_classes={1: (2, 10)}, tenants={"acme": 4})]}}


def shown() -> View:
    return view("http://service", polled(0.0, REPORT), None)


def documented() -> dict[str, list[str]]:
    """Return the names in the README's tables about the JSON, by their object."""
    page = (Path(serve_app.__file__).parent / "docs/howto/monitor.md").read_text()
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


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("", View),
        ("models[]", ModelFigures),
        ("models[].replicas[]", ReplicaFigures),
        ("models[].adapters[]", AdapterFigures),
        ("tenants[]", TenantFigures),
        ("figures", Figures),
    ],
)
def test_the_docs_name_every_field(name: str, kind: type) -> None:
    assert sorted(documented()[name]) == sorted(field.name for field in fields(kind))


def test_a_view_is_json_as_it_is() -> None:
    body = shown().body()
    assert json.loads(json.dumps(body, allow_nan=False)) == body
    assert (body["time"], body["batches"]) == ("2026-11-01T12:00:00+00:00", None)
    assert body["models"][0]["figures"]["waiting_by_tier"] == {"flex": 2}
