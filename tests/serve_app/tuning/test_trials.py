"""Trials: figures, their errors, and what is closest to a miss."""

import math

import pytest

from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.goals import Goal, Metric, parse_goals
from serve_app.tuning.planning import Trials
from serve_app.tuning.twin import ReplicaSettings
from serve_app.tuning.workload import TokenLengths, Workload

PROFILE = PROFILES["h100-8b"]
DEFAULT = ReplicaSettings.of(PROFILE)


def trials(goals: str = "ttft_p99<1", rate: float = 20.0, output: str = "100:60", seed: int = 0) -> Trials:
    load = Workload.of(rate, TokenLengths.parse("500:300"), TokenLengths.parse(output))
    return Trials(PROFILE, load, parse_goals(goals), seed)


def test_the_error_covers_another_seed() -> None:
    """95 of 100 differences of two samples are within the sum of their errors."""
    found = [trials(seed=100 * seed).trial(3, DEFAULT, 4) for seed in range(6)]
    key: tuple[Metric, int] = ("ttft", 99)
    first = found[0]
    outside = [
        other
        for other in found[1:]
        if abs(other.figures[key] - first.figures[key]) > first.errors[key] + other.errors[key]
    ]
    assert len(outside) <= 1
    assert 0 < first.errors[key] < 0.5 * first.figures[key]


def test_one_run_says_nothing_of_its_error() -> None:
    assert set(trials().trial(2, DEFAULT).errors.values()) == {0.0}


def test_a_miss_is_named_and_measured() -> None:
    found = trials("ttft_p99<0.001,tpot_p50<1")
    trial = found.trial(3, DEFAULT)
    assert trial.misses == (Goal("ttft", 99, 0.001),)
    assert not trial.holds
    assert trial.slack(found.goals) == pytest.approx(0.001 / trial.figures["ttft", 99])


def test_goals_within_the_error_are_unsure() -> None:
    known = trials().trial(3, DEFAULT, 4)
    close = known.figures["ttft", 99] + known.errors["ttft", 99] / 2
    assert known.unsure([Goal("ttft", 99, close)]) == [Goal("ttft", 99, close)]
    assert known.unsure([Goal("ttft", 99, 10 * close)]) == []


def test_a_goal_of_another_percentile_has_a_figure() -> None:
    trial = trials("latency_p90<5").trial(3, DEFAULT)
    assert trial.figures["latency", 50] < trial.figures["latency", 90] < trial.figures["latency", 99]


def test_answers_of_one_token_have_no_tpot() -> None:
    trial = trials("tpot_p99<0.1", output="1").trial(3, DEFAULT)
    assert trial.figures["tpot", 99] == 0.0
    assert math.isfinite(trial.slack([Goal("tpot", 99, 0.1)]))
