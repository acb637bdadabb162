"""The Serve config of a service: what Ray Serve and this application read in it."""

from dataclasses import replace
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.schema import ServeDeploySchema

from serve_app.models.service import HOST_VARIABLE, ONE_PROCESS, ServiceParts, serve_config
from serve_app.settings.ingress import IngressSettings
from serve_app.settings.models import BatcherSettings, LLMSettings
from serve_app.settings.schema import Settings, parse
from serve_app.system.yaml_text import Noted, put
from tests.serve_app.test_configs import unexplained

SERVICE = ServiceParts(
    head="A test.",
    id="toy",
    source="org/toy",
    engine={"max_model_len": Noted(2048, "Context."), "distributed_executor_backend": ONE_PROCESS},
    sampling=Noted({"temperature": Noted(0.5)}, "Defaults."),
    folder="toys",
    ingress={"num_replicas": Noted(1, "One.")},
    deployment={"num_replicas": Noted(3, "Three.")},
)


def written(**changes: Any) -> dict[str, Any]:
    """Return the content of a config that Ray Serve takes."""
    content: dict[str, Any] = yaml.safe_load(serve_config(replace(SERVICE, **changes)).text())
    ServeDeploySchema.model_validate(content)
    return content


def settings(content: dict[str, Any]) -> tuple[Settings, LLMSettings]:
    """Return the settings of a config, and those of its model."""
    (application,) = content["applications"]
    found = parse(application["args"])
    (model,) = found.models
    assert isinstance(model, LLMSettings)
    return found, model


def test_a_config_has_what_differs_between_services() -> None:
    content = written()
    found, model = settings(content)
    assert (model.id, model.source) == ("toy", "org/toy")
    assert model.engine.max_model_len == 2048
    assert model.sampling.temperature == 0.5
    assert found.batches
    assert found.batches.folder == "~/.local/share/saturate/toys"
    assert content["applications"][0]["deployments"] == [
        {"name": "Ingress", "num_replicas": 1},
        {"name": "Engine:toy", "num_replicas": 3},
    ]
    assert content["http_options"] == {"host": "127.0.0.1", "port": 8000}


@pytest.mark.parametrize(("value", "host"), [("0.0.0.0", "0.0.0.0"), ("", "127.0.0.1")])
def test_the_environment_may_have_another_default_of_the_address(value: str, host: str) -> None:
    assert serve_config(SERVICE, {HOST_VARIABLE: value}).http["host"].value == host


def test_the_limits_that_a_config_shows_are_the_defaults() -> None:
    found, model = settings(written())
    assert found.ingress == IngressSettings()
    assert model.batcher == BatcherSettings()


def test_every_value_has_a_comment() -> None:
    assert unexplained(serve_config(SERVICE).text()) == []


@pytest.mark.parametrize("id", ["1", "1e3", "no", "null", "0x10", "2026-01-01", "a.b_c-d", "org/model"])
def test_a_name_stays_text_whatever_yaml_would_take_it_for(id: str) -> None:
    content = written(id=id)
    assert settings(content)[1].id == id
    assert content["applications"][0]["deployments"][1]["name"] == f"Engine:{id}"


@given(st.text("aé模😀 \n\t\"'#:%&*{}[],~/\\-", min_size=1), st.text("aé模😀 \n#:-"))
def test_a_source_and_a_first_comment_of_any_text_change_nothing_else(source: str, head: str) -> None:
    expected = written()
    expected["applications"][0]["args"]["models"][0]["source"] = source
    assert written(source=source, head=head) == expected


def test_a_value_that_is_set_in_a_config_is_set_in_no_other() -> None:
    mine = serve_config(SERVICE)
    put(mine.model, ["engine", "distributed_executor_backend"], "mp", "Set.")
    put(mine.deployment, ["num_replicas"], 5, "Set.")
    assert ONE_PROCESS.value != "mp"
    content = written()
    assert settings(content)[1].engine.distributed_executor_backend == ONE_PROCESS.value
    assert content["applications"][0]["deployments"][1]["num_replicas"] == 3
