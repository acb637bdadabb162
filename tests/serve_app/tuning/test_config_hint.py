"""The lines of a config that a plan prints."""

from dataclasses import replace

import pytest
import yaml
from ray.serve.schema import DeploymentSchema

from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse
from serve_app.simulation.profiles import PROFILES
from serve_app.tuning.config_hint import batcher_goals, snippet
from serve_app.tuning.goals import parse_goals
from serve_app.tuning.replica import Settings
from serve_app.tuning.trials import Trial

DEFAULT = Settings.of(PROFILES["h100-8b"])
TRIAL = Trial(3, DEFAULT, {}, {}, (), 0.5, 0.9, 0.3, 10, 4_000)


@pytest.mark.parametrize(
    "chosen",
    [DEFAULT, replace(DEFAULT, max_num_batched_tokens=1024), replace(DEFAULT, max_running=40)],
    ids=["default", "steps", "window"],
)
def test_a_service_takes_the_lines(chosen: Settings) -> None:
    goals = parse_goals("ttft_p99<0.5,tpot_p99<0.05")
    text = snippet(replace(TRIAL, settings=chosen), DEFAULT, goals)
    model, _, deployments = text.partition("# in deployments:\n")
    (deployment,) = yaml.safe_load(deployments)
    assert DeploymentSchema.model_validate(deployment).num_replicas == 3
    fields = yaml.safe_load(model) or {}
    (parsed,) = parse({"models": [{"id": "m", "source": "s", **fields}]}).models
    assert isinstance(parsed, LLMSettings)
    assert parsed.batcher.max_running == chosen.max_running
    changed = chosen.max_num_batched_tokens != DEFAULT.max_num_batched_tokens
    assert parsed.engine.max_num_batched_tokens == (chosen.max_num_batched_tokens if changed else None)


def test_goals_are_those_that_the_settings_have() -> None:
    held = batcher_goals(parse_goals("tpot_p99<0.05,ttft_p99<0.5,latency_p99<9,ttft_p50<0.1"))
    assert held == {"ttft_p99_s": 0.5, "tpot_p99_s": 0.05}
    parse({"models": [{"id": "m", "source": "s", "batcher": {"goals": held}}]})
    assert batcher_goals(parse_goals("tpot_p99<0.05")) == {"tpot_p99_s": 0.05}
    assert batcher_goals(parse_goals("ttft_p90<0.5")) == {}
