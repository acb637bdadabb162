"""The search for the fewest replicas."""

from dataclasses import replace

import pytest

from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.planning import MOST_LOAD, RUNS, NoPlanError, Plan, Search, Trials, full_rate
from serve_app.tuning.twin import ReplicaSettings
from serve_app.tuning.workload import TokenLengths, Workload


def trials(device: str | Profile, rate: float, input: str, output: str, goals: str, seed: int = 0) -> Trials:
    load = Workload.of(rate, TokenLengths.parse(input), TokenLengths.parse(output))
    return Trials(PROFILES[device] if isinstance(device, str) else device, load, parse_goals(goals), seed)


def check(plan: Plan, found: Trials) -> None:
    """Check what holds of every plan."""
    answer = plan.answer
    assert answer.holds
    assert answer.load <= MOST_LOAD + 1e-9
    assert answer in plan.rows
    assert len(plan.rows) <= 5
    assert [row.replicas for row in plan.rows] == sorted(row.replicas for row in plan.rows)
    assert all(row.requests >= 4_000 for row in plan.rows)
    assert plan.least <= answer.replicas


def test_the_answer_is_the_fewest_that_hold() -> None:
    found = trials("h100-8b", 30, "800:400", "100:60", "ttft_p99<0.25")
    plan = Search(found, 64).plan()
    check(plan, found)
    default = ReplicaSettings.of(found.profile)
    if plan.answer.replicas > plan.least:
        assert not found.trial(plan.answer.replicas - 1, default, RUNS).holds
    # One that holds with more replicas as well.
    assert found.trial(plan.answer.replicas + 1, plan.answer.settings, RUNS).holds


def test_without_a_tight_goal_the_work_decides() -> None:
    found = trials("h100-8b", 50, "1500", "300", "latency_p99<60")
    plan = Search(found, 64).plan()
    check(plan, found)
    rate = full_rate(found.profile, found.workload, ReplicaSettings.of(found.profile))
    assert plan.answer.replicas == plan.least
    assert (plan.least - 1) * rate * MOST_LOAD < 50 <= plan.least * rate * MOST_LOAD


def test_shorter_steps_are_found_where_tpot_is_tight() -> None:
    steps = {
        "base_ms": 24.0,
        "per_prefill_token_ms": 0.07,
        "per_sequence_ms": 0.05,
        "per_kv_token_ms": 2.4e-5,
    }
    device = PROFILES["h100-70b-tp4"].model_copy(update=steps)
    found = trials(device, 100, "512", "128:128", "ttft_p99<1,tpot_p99<0.06")
    plan = Search(found, 64).plan()
    check(plan, found)
    default = ReplicaSettings.of(found.profile)
    assert plan.answer.settings != default
    assert not found.trial(plan.answer.replicas, default, RUNS).holds
    rows = [(row.replicas, row.settings) for row in plan.rows]
    assert (plan.answer.replicas, default) in rows


def test_a_seed_has_one_plan() -> None:
    first, again = (
        Search(trials("l4-7b", 2, "500", "100:50", "ttft_p99<2", seed=3), 64).plan() for _ in range(2)
    )
    assert first == again


def test_a_goal_below_a_lone_request_has_no_plan() -> None:
    found = trials("l4-7b", 1, "1500", "300", "ttft_p99<0.4,tpot_p99<0.1")
    with pytest.raises(
        NoPlanError, match=r"ttft_p99<0\.4: a request that is alone .* ttft_p99 0\.4383 s"
    ) as no:
        Search(found, 64).plan()
    assert [goal.name for goal in no.value.misses] == ["ttft_p99"]
    assert no.value.best["tpot", 99] == pytest.approx(0.0514, abs=0.0005)
    assert no.value.trial is None


def test_more_work_than_the_replicas_can_do_has_no_plan() -> None:
    with pytest.raises(
        NoPlanError, match=r"3 replicas can't do the work: each does 11.* take at least 5 with"
    ):
        Search(trials("h100-8b", 50, "1500", "300", "ttft_p99<5"), 3).plan()


def test_a_goal_that_takes_more_replicas_has_no_plan() -> None:
    found = trials("h100-8b", 50, "1500", "300", "tpot_p99<0.015")
    with pytest.raises(
        NoPlanError, match=r"5 replicas, the most that were allowed, miss tpot_p99<0\.015"
    ) as no:
        Search(found, 5).plan()
    assert no.value.trial is not None
    assert no.value.trial.replicas == 5
    assert no.value.best["tpot", 99] > 0.015


def test_a_fleet_is_sampled() -> None:
    found = trials("h100-8b", 10, "500", "100:50", "ttft_p99<1")
    whole, part = found.trial(4, ReplicaSettings.of(found.profile), RUNS), None
    large = replace(found.workload, rate=10 * 25.0)
    many = Trials(found.profile, large, found.goals)
    part = many.trial(100, ReplicaSettings.of(found.profile), RUNS)
    for key in whole.figures:
        assert part.figures[key] == pytest.approx(whole.figures[key], rel=0.1), key
    assert part.load == pytest.approx(whole.load)
