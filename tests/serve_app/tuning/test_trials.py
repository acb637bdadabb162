"""Trials: figures, their errors, and what is closest to a miss."""

import math

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.goals import Goal, parse_goals
from serve_app.tuning.planning import Trials
from serve_app.tuning.workload import TokenLengths, Workload

PROFILE = PROFILES["h100-8b"]
DEFAULT = ReplicaSettings.of(PROFILE)
FIRST = Goal("ttft", 99, 1.0).key
RUNS = 4


def trials(output: str = "6:4", seed: int = 0) -> Trials:
    load = Workload.of(40.0, TokenLengths.parse("500:300"), TokenLengths.parse(output))
    return Trials(PROFILE, load, parse_goals("ttft_p99<0.001,tpot_p50<1,latency_p90<5"), seed)


@pytest.fixture(scope="module")
def found() -> Trials:
    made = trials()
    made.run([(2, DEFAULT, RUNS)])
    return made


@pytest.mark.long
def test_the_error_covers_another_seed() -> None:
    """95 of 100 differences of two samples are within the sum of their errors."""
    first, *others = [trials(seed=100 * seed).trial(2, DEFAULT, RUNS) for seed in range(6)]
    outside = [
        other
        for other in others
        if abs(other.figures[FIRST] - first.figures[FIRST]) > first.errors[FIRST] + other.errors[FIRST]
    ]
    assert len(outside) <= 1
    assert 0 < first.errors[FIRST] < 0.5 * first.figures[FIRST]


def test_one_run_says_nothing_of_its_error(found: Trials) -> None:
    assert set(found.trial(2, DEFAULT).errors.values()) == {0.0}


def test_a_miss_is_named_and_measured(found: Trials) -> None:
    trial = found.trial(2, DEFAULT, RUNS)
    assert trial.misses == (Goal("ttft", 99, 0.001),)
    assert not trial.holds
    assert trial.slack(found.goals) == pytest.approx(0.001 / trial.figures[FIRST])
    assert trial.requests == 4 * 600


def test_goals_within_the_error_are_unsure(found: Trials) -> None:
    known = found.trial(2, DEFAULT, RUNS)
    close = known.figures[FIRST] + known.errors[FIRST] / 2
    assert known.unsure([Goal("ttft", 99, close)]) == [Goal("ttft", 99, close)]
    assert known.unsure([Goal("ttft", 99, 10 * close)]) == []


def test_a_goal_of_another_percentile_has_a_figure(found: Trials) -> None:
    figures = found.trial(2, DEFAULT, RUNS).figures
    assert figures["latency", 50] < figures["latency", 90] < figures["latency", 99]


def test_answers_of_one_token_have_no_tpot() -> None:
    figures = trials(output="1").lone(DEFAULT)
    assert figures["tpot", 99] == 0.0
    assert math.isfinite(figures["ttft", 99])
