"""The words, the tables and the JSON of a plan, of trials made by hand."""

import json
from dataclasses import replace
from typing import Any

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.goals import METRICS, parse_goals
from serve_app.tuning.plan_report import PlanReport
from serve_app.tuning.planning import NoPlanError, Plan, Trial, Trials, full_rate
from serve_app.tuning.twin import ReplicaSettings
from serve_app.tuning.workload import TokenLengths, Workload

PROFILE = PROFILES["h100-8b"]
DEFAULT = ReplicaSettings.of(PROFILE)
WORKLOAD = Workload.of(50.0, TokenLengths.parse("1500"), TokenLengths.parse("300"), prefix_share=0.25)


def report(
    goals: str = "ttft_p99<0.5", price: float | None = None, workload: Workload = WORKLOAD
) -> PlanReport:
    return PlanReport(Trials(PROFILE, workload, parse_goals(goals)), price)


def trial(found: PlanReport, replicas: int, ttft: float = 0.25, **changes: Any) -> Trial:
    """Return a trial; the goals about the TTFT hold up to their bound, and the others always."""
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


def plan(found: PlanReport, *others: Trial, least: int = 1, **changes: Any) -> Plan:
    """Return a plan of five replicas."""
    answer = trial(found, 5, **changes)
    return Plan(answer, (*others, answer), least)


def columns(text: str) -> list[list[str]]:
    """Return the cells of the table, which are two spaces or more apart."""
    lines = text.splitlines()
    (rule,) = [number for number, line in enumerate(lines) if "──" in line]
    begins = [n for n, sign in enumerate(lines[rule]) if sign == "─" and lines[rule][n - 1 : n] != "─"]
    ends = [*begins[1:], None]
    rows = [lines[rule - 1], *lines[rule + 1 : lines.index("", rule)]]
    return [[row[begin:end].strip() for begin, end in zip(begins, ends, strict=True)] for row in rows]


def test_the_headline_says_how_many_replicas_and_what_for() -> None:
    found = report("ttft_p99<0.5,tpot_p99<0.05")
    assert found.text(plan(found)).startswith(
        "5 replicas of h100-8b with default settings\n"
        "for 50 requests/s of 1500 tokens in and 300 out, max_tokens 300, so that ttft_p99<0.5, "
        "tpot_p99<0.05.\n\n"
    )
    one = Plan(trial(found, 1, settings=replace(DEFAULT, max_running=40)), (), 1)
    assert found.text(replace(one, rows=(one.answer,))).startswith(
        "1 replica of h100-8b with batcher.max_running 40\n"
    )
    both = replace(DEFAULT, max_running=40, max_num_batched_tokens=1024)
    assert " with engine.max_num_batched_tokens 1024 and batcher.max_running 40\n" in found.text(
        plan(found, settings=both)
    )


def test_the_table_marks_the_answer_and_names_the_misses() -> None:
    found = report()
    shown = plan(found, trial(found, 4, ttft=1.5, settings=replace(DEFAULT, max_running=64)))
    heads, missed, chosen = columns(found.text(shown))
    assert heads == [
        *("", "replicas", "settings", "TTFT p50", "TTFT p99", "TPOT p50", "TPOT p99"),
        *("tok/s", "load", "KV", "misses"),
    ]
    seconds = ["1.50±0.01 s"] * 2 + ["12.5±10.0 ms"] * 2
    assert missed == ["", "4", "max_running 64", *seconds, "15,000", "80%", "46%", "ttft_p99"]
    assert chosen[:4] == ["▶", "5", "default", "250±10 ms"]
    assert chosen[-1] == ""


def test_columns_without_content_are_left_out_and_goals_without_a_column_get_one() -> None:
    found = report("ttft_p90<0.5,ttft_p99<1,latency_p99<9")
    heads, row = columns(found.text(plan(found)))
    assert "misses" not in heads
    assert heads.count("TTFT p99") == 1
    shown = dict(zip(heads, row, strict=True))
    assert (shown["ttft_p90"], shown["latency_p99"]) == ("250±10 ms", "4.00±0.01 s")


def test_a_price_is_that_of_all_replicas() -> None:
    found = report(price=2.0)
    # 50 requests/s of 300 tokens out are 54 million an hour; those in are five times as many.
    cost = {
        "per_hour": 10.0,
        "per_million_output_tokens": pytest.approx(10 / 54),
        "per_million_tokens": pytest.approx(10 / 324),
    }
    assert found.cost(trial(found, 5)) == cost
    heads, row = columns(found.text(plan(found)))
    shown = dict(zip(heads, row, strict=True))
    assert (shown["price/h"], shown["per M out"], shown["per M"]) == ("10.00", "0.19", "0.03")
    assert "per M out: price of a million tokens of answers" in found.text(plan(found))
    assert found.body(plan(found))["answer"]["cost"]["per_hour"] == 10.0


def test_a_price_of_nothing_is_a_price() -> None:
    free, none = report(price=0.0), report()
    assert free.body(plan(free))["answer"]["cost"] == {
        "per_hour": 0.0,
        "per_million_output_tokens": 0.0,
        "per_million_tokens": 0.0,
    }
    assert "price/h" in free.text(plan(free))
    assert none.body(plan(none))["answer"]["cost"] is None
    assert "per M" not in none.text(plan(none))


def test_notes_say_why_there_are_not_fewer_and_what_is_unsure() -> None:
    found = report()
    said = found.text(plan(found, least=5))
    load = found.trials.load(4, DEFAULT)
    assert f"4 can't do the work: their load would be {load:.1%}, and 95% is the most of a plan." in said
    assert "±: error of 95% from 8,000 simulated requests per row." in said
    assert "closer to its bound" not in said
    # Fewer could do the work, but not hold the goals.
    assert "can't do the work" not in found.text(plan(found, least=4))
    unsure = found.text(plan(found, ttft=0.495))
    assert "ttft_p99 is closer to its bound than its error; with one replica more it is safer." in unsure


def test_a_load_just_above_the_most_is_shown_as_such() -> None:
    rate = 0.952 * full_rate(PROFILE, WORKLOAD, DEFAULT)
    found = report(workload=replace(WORKLOAD, rate=rate))
    answer = trial(found, 2)
    said = found.text(Plan(answer, (answer,), 2))
    assert "\n1 can't do the work: its load would be 95.2%, and 95% is the most of a plan.\n" in said


def test_the_lines_of_the_config_come_last() -> None:
    found = report("ttft_p99<0.5")
    shown = plan(found, settings=replace(DEFAULT, max_running=40))
    text, body = found.text(shown), found.body(shown)
    assert text.endswith(f"\n\n{body['config']}\n")
    assert "max_running: 40" in body["config"]
    assert "num_replicas: 5" in body["config"]
    assert "goals: {ttft_p99_s: 0.5}" in body["config"]


def test_the_json_has_the_question_and_every_row() -> None:
    found = report("ttft_p99<0.5", workload=replace(WORKLOAD, input=TokenLengths.parse("1500:800")))
    body = json.loads(
        json.dumps(found.body(plan(found, trial(found, 4, ttft=1.5), least=3)), allow_nan=False)
    )
    assert {name: body[name] for name in list(body)[:9]} == {
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
    assert body["least_replicas"] == 3
    missed, answer = body["rows"]
    assert answer == body["answer"]
    assert (missed["replicas"], missed["holds"], missed["misses"]) == (4, False, ["ttft_p99<0.5"])
    assert missed["seconds"]["ttft_p99"] == 1.5
    assert missed["errors"] == dict.fromkeys(missed["seconds"], 0.01)
    figures = ("settings", "output_tokens_per_s", "load", "busy", "kv_reserved", "most_running", "requests")
    assert [missed[name] for name in figures] == [{}, 15_000.0, 0.8, 0.9, 0.456, 70, 8_000]


def test_the_json_of_no_plan_has_the_reason_and_the_best_that_was_seen() -> None:
    found = report()
    best = trial(found, 5, ttft=1.5)
    body = found.no_plan(NoPlanError("5 replicas miss it", best.figures, best.misses, best))
    assert (body["met"], body["reason"], body["misses"]) == (False, "5 replicas miss it", ["ttft_p99<0.5"])
    assert body["best"]["ttft_p99"] == 1.5
    assert body["best_settings"]["replicas"] == 5
    # A lone request has missed it, so there was no trial.
    lone = found.no_plan(NoPlanError("it is alone", best.figures, best.misses))
    assert lone["best_settings"] is None
    assert json.loads(json.dumps(lone, allow_nan=False))["best"] == body["best"]


@pytest.mark.parametrize(
    ("seconds", "shown"),
    [(0.0, "0.0±10.0 ms"), (0.0999, "99.9±10.0 ms"), (0.1, "100±10 ms"), (1.0, "1.00±0.01 s")],
)
def test_a_time_has_the_digits_that_it_needs(seconds: float, shown: str) -> None:
    found = report()
    heads, row = columns(found.text(plan(found, ttft=seconds, misses=())))
    assert dict(zip(heads, row, strict=True))["TTFT p50"] == shown


def test_great_and_small_numbers_stay_apart_in_the_table() -> None:
    many = Workload.of(1e6, TokenLengths.parse("131000"), TokenLengths.parse("999999999"))
    found = report("latency_p1<1e9", price=1e9, workload=many)
    big = trial(found, 100_000, load=123.4, settings=replace(DEFAULT, max_running=10**9))
    heads, *rows = columns(found.text(Plan(big, (trial(found, 1), big), 1)))
    assert all(len(row) == len(heads) for row in rows)
    shown = dict(zip(heads, rows[1], strict=True))
    assert (shown["replicas"], shown["load"], shown["tok/s"]) == ("100000", "12340%", "999,999,999,000,000")
    assert shown["price/h"] == "100,000,000,000,000.00"
