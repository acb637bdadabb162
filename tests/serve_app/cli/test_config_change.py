"""A config with chosen settings."""

from typing import Any

import pytest

from serve_app.cli.tune_config import ChangeError, changed
from serve_app.settings.user_config import parse_user_config
from serve_app.tuning.tuner import TunedSettings

CHOICE = TunedSettings(15, 30, {"ttft_p99_s": 0.5})


def config(**deployment: Any) -> Any:
    model = {"id": "m", "source": "org/m"}
    deployments = [{"name": "Ingress"}, {"name": "Engine:m", **deployment}]
    return {"applications": [{"name": "llm", "args": {"models": [model]}, "deployments": deployments}]}


def test_settings_go_where_they_restart_nothing() -> None:
    before = config(user_config={"batcher": {"capacity_tokens": 9}})
    (app,) = changed(before, "m", CHOICE)["applications"]
    assert app["args"] == before["applications"][0]["args"]
    _, engine = app["deployments"]
    assert engine["user_config"]["batcher"] == {
        "capacity_tokens": 9,
        "max_queue_size": 15,
        "goals": {"ttft_p99_s": 0.5},
    }
    parse_user_config(engine["user_config"])
    # The config that was given stays as it is.
    assert "max_queue_size" not in before["applications"][0]["deployments"][1]["user_config"]["batcher"]


def test_the_target_of_the_scaling_changes() -> None:
    before = config(autoscaling_config={"max_replicas": 4, "target_ongoing_requests": 2})
    (app,) = changed(before, "m", CHOICE)["applications"]
    assert app["deployments"][1]["autoscaling_config"] == {"max_replicas": 4, "target_ongoing_requests": 30}
    # A policy has a target of its own.
    scaling = {"max_replicas": 4, "policy": {"policy_function": "x:Y"}}
    (app,) = changed(config(autoscaling_config=scaling), "m", CHOICE)["applications"]
    assert app["deployments"][1]["autoscaling_config"] == scaling


def test_a_model_without_a_deployment_gets_one() -> None:
    before = config()
    del before["applications"][0]["deployments"]
    (app,) = changed(before, "m", CHOICE)["applications"]
    assert [each["name"] for each in app["deployments"]] == ["Engine:m"]


def test_a_key_without_a_value_is_an_empty_list() -> None:
    before = config()
    before["applications"][0]["deployments"] = None
    (app,) = changed(before, "m", CHOICE)["applications"]
    assert [each["name"] for each in app["deployments"]] == ["Engine:m"]


def test_a_model_that_is_not_there_is_told() -> None:
    with pytest.raises(ChangeError, match="the config has no model 'n'"):
        changed(config(), "n", CHOICE)
