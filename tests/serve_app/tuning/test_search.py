"""The search for the fewest replicas."""

from dataclasses import replace

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.planning import NoPlanError, Plan, Search, Trials
from serve_app.tuning.workload import BatchWork, StepGoals, TokenLengths, Workload

RUNS, MOST_LOAD = 4, 0.95

SLOW: dict[str, dict[str, float]] = {
    "h100-8b": {
        "base_ms": 10.0,
        "per_prefill_token_ms": 0.03,
        "per_sequence_ms": 0.04,
        "per_kv_token_ms": 3.9e-5,
    },
    "h100-70b-tp4": {
        "base_ms": 24.0,
        "per_prefill_token_ms": 0.07,
        "per_sequence_ms": 0.05,
        "per_kv_token_ms": 2.4e-5,
    },
}
"""Times of steps with which the goals of these tests are close to what the devices hold."""


def trials(device: str, rate: float, input: str, output: str, goals: str, seed: int = 0) -> Trials:
    load = Workload.of(rate, TokenLengths.parse(input), TokenLengths.parse(output))
    profile = PROFILES[device].model_copy(update=SLOW.get(device, {}))
    return Trials(profile, load, parse_goals(goals), seed)


def check(plan: Plan) -> None:
    """Check what holds of every plan."""
    answer = plan.answer
    assert answer.holds
    assert answer.load <= MOST_LOAD + 1e-9
    assert answer in plan.rows
    assert [row.replicas for row in plan.rows] == sorted(row.replicas for row in plan.rows)
    assert plan.least <= answer.replicas


@pytest.mark.long
def test_the_answer_is_the_fewest_that_hold() -> None:
    found = trials("h100-8b", 60, "800:400", "30:20", "ttft_p99<0.2")
    plan = Search(found, 64).plan()
    check(plan)
    default = ReplicaSettings.of(found.profile)
    assert plan.answer.replicas > plan.least
    assert not found.trial(plan.answer.replicas - 1, default, RUNS).holds
    # One that holds with more replicas as well.
    assert found.trial(plan.answer.replicas + 1, plan.answer.settings).holds


@pytest.mark.long
def test_without_a_tight_goal_the_work_decides() -> None:
    found = trials("h100-8b", 50, "1500", "100", "latency_p99<60")
    plan = Search(found, 64).plan()
    check(plan)
    default = ReplicaSettings.of(found.profile)
    assert plan.answer.replicas == plan.least > 1
    assert found.load(plan.least, default) <= MOST_LOAD < found.load(plan.least - 1, default)


@pytest.mark.long
def test_shorter_steps_are_found_where_tpot_is_tight() -> None:
    found = trials("h100-70b-tp4", 30, "2000:2000", "24:16", "ttft_p99<5,tpot_p99<0.09")
    plan = Search(found, 64).plan()
    check(plan)
    default = ReplicaSettings.of(found.profile)
    assert plan.answer.settings != default
    assert (plan.answer.replicas, default) in [(row.replicas, row.settings) for row in plan.rows]


def test_a_goal_below_a_lone_request_has_no_plan() -> None:
    found = trials("l4-7b", 1, "1500", "300", "ttft_p99<0.4,tpot_p99<0.1")
    with pytest.raises(NoPlanError, match=r"ttft_p99<0\.4: a request that is alone .* 0\.4383 s") as no:
        Search(found, 64).plan()
    assert [goal.name for goal in no.value.misses] == ["ttft_p99"]
    assert no.value.best["tpot", 99] == pytest.approx(0.0514, abs=0.0005)
    assert no.value.trial is None


def test_more_work_than_the_replicas_can_do_has_no_plan() -> None:
    with pytest.raises(
        NoPlanError, match=r"3 replicas can't do the work: each does 11.* take at least 5 with"
    ):
        Search(trials("h100-8b", 50, "1500", "300", "ttft_p99<5"), 3).plan()


@pytest.mark.long
def test_a_goal_that_takes_more_replicas_has_no_plan() -> None:
    found = trials("h100-8b", 60, "800:400", "30:20", "ttft_p99<0.1")
    least = Search(found, 64).least_replicas()
    with pytest.raises(NoPlanError, match=r"the most that were allowed, miss ttft_p99<0\.1: the best") as no:
        Search(found, least).plan()
    assert no.value.trial is not None
    assert no.value.trial.replicas == least
    assert no.value.best["ttft", 99] > 0.1


@pytest.mark.long
def test_a_fleet_is_sampled() -> None:
    found = trials("h100-8b", 20, "500", "30:20", "ttft_p99<1")
    whole = found.trial(2, ReplicaSettings.of(found.profile), RUNS)
    large = replace(found.workload, rate=20 * 50.0)
    part = Trials(found.profile, large, found.goals).trial(100, ReplicaSettings.of(found.profile), RUNS)
    for key in whole.figures:
        assert part.figures[key] == pytest.approx(whole.figures[key], rel=0.1), key
    assert part.load == pytest.approx(whole.load)


@pytest.mark.long
def test_a_batch_that_needs_more_tokens_gets_more_replicas() -> None:
    live = Workload.of(4.0, TokenLengths.parse("256:100"), TokenLengths.parse("64:20"))
    rows = BatchWork(TokenLengths.parse("512:256"), TokenLengths.parse("128:64"))

    def plan(tokens: float, most: int = 4) -> int:
        load = replace(live, batch=rows._replace(tokens_per_s=tokens), goals=StepGoals(0.285, 0.0285))
        found = Trials(PROFILES["h100-7b"], load, parse_goals("ttft_p99<0.3,tpot_p99<0.03"))
        return Search(found, most).plan().answer.replicas

    assert plan(8_000) == 2
    with pytest.raises(NoPlanError, match=r"miss 8000 tokens/s for the batch: the best settings .* tok"):
        plan(8_000, most=1)
