"""The lines of a config that a plan prints."""

from dataclasses import replace

import pytest
import yaml
from ray.serve.schema import DeploymentSchema

from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.goals import batcher_goals, parse_goals
from serve_app.tuning.plan_report import PlanReport
from serve_app.tuning.planning import Trial, Trials
from serve_app.tuning.workload import BatchWork, StepGoals, TokenLengths, Workload

DEFAULT = ReplicaSettings.of(PROFILES["h100-8b"])
TRIAL = Trial(3, DEFAULT, {}, {}, (), 0.5, 0.9, 0.3, 10, 4_000)


@pytest.mark.parametrize(
    "chosen",
    [
        DEFAULT,
        replace(DEFAULT, max_num_batched_tokens=1024),
        replace(DEFAULT, overcommit=True),
    ],
    ids=["default", "steps", "overcommitment"],
)
@pytest.mark.parametrize("batch", [False, True])
def test_a_service_takes_the_lines(chosen: ReplicaSettings, batch: bool) -> None:
    goals = parse_goals("ttft_p99<0.5,tpot_p99<0.05")
    load = Workload.of(5.0, TokenLengths(500), TokenLengths(50))
    if batch:
        load = replace(load, batch=BatchWork(TokenLengths(64), TokenLengths(64)), goals=StepGoals(0.4))
    report = PlanReport(Trials(PROFILES["h100-8b"], load, goals))
    text = report.snippet(replace(TRIAL, settings=chosen))
    model, _, deployments = text.partition("# in deployments:\n")
    (deployment,) = yaml.safe_load(deployments)
    assert DeploymentSchema.model_validate(deployment).num_replicas == 3
    fields = yaml.safe_load(model) or {}
    (parsed,) = parse({"models": [{"id": "m", "source": "s", **fields}]}).models
    assert isinstance(parsed, LLMSettings)
    assert (parsed.batcher.policy == "max_utilization") == chosen.overcommit
    assert (parsed.batcher.goals is not None) == batch
    changed = chosen.max_num_batched_tokens != DEFAULT.max_num_batched_tokens
    assert parsed.engine.max_num_batched_tokens == (chosen.max_num_batched_tokens if changed else None)


def test_goals_are_those_that_the_settings_have() -> None:
    held = batcher_goals(parse_goals("tpot_p99<0.05,ttft_p99<0.5,latency_p99<9,ttft_p50<0.1"))
    assert held == {"ttft_p99_s": 0.5, "tpot_p99_s": 0.05}
    parse({"models": [{"id": "m", "source": "s", "batcher": {"goals": held}}]})
    assert batcher_goals(parse_goals("tpot_p99<0.05")) == {"tpot_p99_s": 0.05}
    assert batcher_goals(parse_goals("ttft_p90<0.5")) == {}
