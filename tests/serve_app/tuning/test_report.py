"""The words, the tables and the JSON of `saturate plan`; reports/ has the texts in full.

`python -m tests.serve_app.tuning.test_report` writes the texts anew.
"""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.goals import METRICS, parse_goals
from serve_app.tuning.plan_report import PlanReport
from serve_app.tuning.planning import NoPlanError, Plan, Trial, Trials
from serve_app.tuning.workload import TokenLengths, Workload

FOLDER = Path(__file__).parent / "reports"
PROFILE = PROFILES["h100-8b"]
DEFAULT = ReplicaSettings.of(PROFILE)
WORKLOAD = Workload.of(50.0, TokenLengths.parse("1500"), TokenLengths.parse("300"), prefix_share=0.25)


def report(
    goals: str = "ttft_p99<0.5", price: float | None = None, workload: Workload = WORKLOAD
) -> PlanReport:
    return PlanReport(Trials(PROFILE, workload, parse_goals(goals)), price)


def trial(found: PlanReport, replicas: int, ttft: float = 0.25, **changes: Any) -> Trial:
    """Return a trial; the goals about the TTFT hold up to their bound, and other goals always."""
    points = [(metric, point) for metric in METRICS for point in (50, 99)]
    points += [(goal.metric, goal.percentile) for goal in found.trials.goals]
    seconds = {"ttft": ttft, "tpot": 0.0125, "latency": 4.0}
    made = Trial(
        replicas=replicas,
        settings=DEFAULT,
        figures={point: seconds[point[0]] for point in points},
        errors=dict.fromkeys(points, 0.01),
        misses=tuple(g for g in found.trials.goals if g.metric == "ttft" and ttft >= g.bound),
        load=0.8,
        busy=0.9,
        held=0.456,
        running=70,
        requests=8_000,
    )
    return replace(made, **changes)


def plan(found: PlanReport, *others: Trial, least: int = 1, replicas: int = 5, **changes: Any) -> Plan:
    """Return a plan of some replicas."""
    answer = trial(found, replicas, **changes)
    return Plan(answer, (*others, answer), least)


# Texts


def missed() -> str:
    """Five replicas hold the goals, and four do so neither with the default settings nor with others."""
    found = report("ttft_p99<0.5,tpot_p99<0.05")
    short = replace(DEFAULT, max_num_batched_tokens=512)
    slow = [trial(found, 4, ttft=1.5), trial(found, 4, ttft=0.0999, settings=short, misses=())]
    return found.text(plan(found, *slow, least=5))


def priced() -> str:
    """Goals without a column, a price, settings of both sections, and a figure close to its bound."""
    found = report("ttft_p90<0.5,ttft_p99<1,latency_p99<9", price=2.0)
    settings = replace(DEFAULT, overcommit=True, max_num_batched_tokens=1024)
    return found.text(plan(found, replicas=1, ttft=0.495, settings=settings, load=0.952))


def great() -> str:
    """Great and small numbers stay apart in the table."""
    many = Workload.of(1e6, TokenLengths.parse("131000"), TokenLengths.parse("999999999"))
    found = report("latency_p1<1e9", price=1e9, workload=many)
    settings = replace(DEFAULT, max_num_batched_tokens=10**9)
    return found.text(plan(found, trial(found, 1), replicas=100_000, load=123.4, settings=settings))


def overloaded() -> str:
    """A replica fewer would have a load just above the most of a plan."""
    rate = 0.952 * WORKLOAD.rate / report().trials.load(1, DEFAULT)
    found = report(workload=replace(WORKLOAD, rate=rate))
    return found.text(plan(found, replicas=2, least=2))


TEXTS: dict[str, Callable[[], str]] = {
    "plan-missed": missed,
    "plan-priced": priced,
    "plan-great-numbers": great,
    "plan-overloaded": overloaded,
}


@pytest.mark.parametrize("name", TEXTS)
def test_the_text_is_the_one_in_the_file(name: str) -> None:
    assert TEXTS[name]() == (FOLDER / f"{name}.txt").read_text()


# JSON


@pytest.mark.parametrize(("price", "each"), [(2.0, 10.0), (0.0, 0.0)])
def test_a_price_counts_all_replicas(price: float, each: float) -> None:
    found = report(price=price)
    # 50 requests/s of 300 tokens out are 54 million an hour; the tokens in are five times as many.
    cost = found.body(plan(found))["answer"]["cost"]
    assert cost == {
        "per_hour": each,
        "per_million_output_tokens": pytest.approx(each / 54, abs=1e-6),
        "per_million_tokens": pytest.approx(each / 324, abs=1e-6),
    }
    assert "price/h" in found.text(plan(found))
    assert report().body(plan(report()))["answer"]["cost"] is None


def test_the_json_has_the_question_and_every_row() -> None:
    found = report("ttft_p99<0.5", workload=replace(WORKLOAD, input=TokenLengths.parse("1500:800")))
    shown = plan(found, trial(found, 4, ttft=1.5), least=3)
    read = json.loads(json.dumps(found.body(shown), allow_nan=False))
    assert {name: read[name] for name in list(read)[:9]} == {
        "met": True,
        "device": "h100-8b",
        "rate": 50.0,
        "input": "1500:800",
        "output": "300",
        "max_tokens": 300,
        "prefix_share": 0.25,
        "batch": None,
        "goals": ["ttft_p99<0.5"],
    }
    assert (read["least_replicas"], read["config"]) == (3, found.snippet(shown.answer))
    missed, answer = read["rows"]
    assert answer == read["answer"]
    assert (missed["replicas"], missed["holds"], missed["misses"]) == (4, False, ["ttft_p99<0.5"])
    assert missed["seconds"]["ttft_p99"] == 1.5
    assert missed["errors"] == dict.fromkeys(missed["seconds"], 0.01)
    figures = ("settings", "output_tokens_per_s", "load", "busy", "kv_reserved", "most_running", "requests")
    assert [missed[name] for name in figures] == [{}, 15_000.0, 0.8, 0.9, 0.456, 70, 8_000]


def test_the_json_of_no_plan_has_the_reason_and_the_best_trial() -> None:
    found = report()
    best = trial(found, 5, ttft=1.5)
    read = found.no_plan(NoPlanError("5 replicas miss it", best.figures, best.misses, best))
    assert (read["met"], read["reason"], read["misses"]) == (False, "5 replicas miss it", ["ttft_p99<0.5"])
    assert read["best"]["ttft_p99"] == 1.5
    assert read["best_settings"]["replicas"] == 5
    # A lone request has missed it, so there was no trial.
    lone = found.no_plan(NoPlanError("it is alone", best.figures, best.misses))
    assert lone["best_settings"] is None
    assert json.loads(json.dumps(lone, allow_nan=False))["best"] == read["best"]


if __name__ == "__main__":
    for name, text in TEXTS.items():
        (FOLDER / f"{name}.txt").write_text(text())
