"""Serve configs: reading, checks, and the change for the request log."""

from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner
from ray.serve.schema import ServeDeploySchema

from serve_app.cli.main import saturate
from serve_app.cli.serve_config import answer_s, own_variables, set_request_log
from serve_app.settings.environment import DRAINING, OFFLINE
from tests.serve_app.cli.services import config, write

ROOT = Path(__file__).parents[3]


def refused(path: Path) -> str:
    """Return why `saturate serve` refuses a config; empty: it doesn't."""
    result = CliRunner().invoke(saturate, ["serve", str(path), "--print-config"])
    assert bool(result.stdout) == (result.exit_code == 0)
    if result.exit_code == 0:
        return ""
    assert result.exit_code == 2, result.output
    message = result.stderr.removeprefix("Error: ").rstrip("\n")
    assert message.startswith(f"{path}: ")
    return message


DEMO = {"id": "demo", "source": "saturate://demo"}


@pytest.mark.parametrize(
    ("models", "names"),
    [
        ([DEMO], [DRAINING.name, OFFLINE.name]),
        ([DEMO, {"id": "s", "simulate": "h100-8b"}], [DRAINING.name, OFFLINE.name]),
        (
            [{"id": "f", "kind": "function", "target": "serve_app.demo.minilm:MiniLM"}],
            [DRAINING.name, OFFLINE.name],
        ),
        ([{"id": "f", "kind": "function", "target": "mine:Model"}], [DRAINING.name]),
        ([DEMO, {"id": "q", "source": "Qwen/Qwen2.5-7B-Instruct"}], [DRAINING.name]),
        ([{"id": "d", "source": "/models/mine"}], [DRAINING.name]),
    ],
)
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_the_environment_of_an_own_ray_follows_the_config(
    host: str, models: list[dict[str, Any]], names: list[str]
) -> None:
    """An own Ray has one machine, on whichever address; a model that may be downloaded reaches the hub."""
    app = {"import_path": "serve_app.app:build", "args": {"models": models}}
    config = ServeDeploySchema.model_validate({"http_options": {"host": host}, "applications": [app]})
    assert [variable.name for variable in own_variables(config)] == names


def test_answers_get_the_time_to_end_that_the_config_gives_them() -> None:
    content = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    assert answer_s(ServeDeploySchema.model_validate(content)) == 900
    content["applications"][0]["runtime_env"] = {"env_vars": {"RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S": "120"}}
    assert answer_s(ServeDeploySchema.model_validate(content)) == 120


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"deployments": [{"name": "Engine:dmo"}]}, "deployments: Engine:dmo: there is no such deployment; "),
        ({"deployments": [{"name": "Batches"}]}, "deployments: Batches: there is no such deployment; "),
        ({"route_prefix": "llm"}, "route_prefix: 'llm': must begin with /"),
        ({"route_prefix": "/llm/"}, "route_prefix: '/llm/': must begin with /, not end with /"),
        (
            {"route_prefix": "/{llm}"},
            "route_prefix: '/{llm}': must begin with /, not end with /, and have no br",
        ),
    ],
)
def test_what_ray_serve_would_refuse_after_its_start_is_found_before(
    tmp_path: Path, change: dict[str, Any], reason: str
) -> None:
    content = config()
    content["applications"][0] |= change
    found = refused(write(tmp_path, content))
    assert reason in found
    assert "deployments" not in change or "Engine:demo" in found


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert refused(tmp_path / "none.yaml").endswith("No such file or directory")
    (tmp_path / "folder.yaml").mkdir()
    assert refused(tmp_path / "folder.yaml").endswith("Is a directory")


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", "line 1"),
        ("", "valid dictionary"),
        ("- 1", "valid dictionary"),
        ("applications:\n- import_path: 5", "import_path"),
        ("http_options: {port: x}\napplications: []", "http_options.port: Input should be a valid integer"),
        (
            "http_options: {port: 81110}\napplications: []",
            "http_options.port: must be from 1 to 65535, not 81110",
        ),
        (
            "http_options: {port: true}\napplications: []",
            "http_options.port: must be from 1 to 65535, not True",
        ),
        ("aplications: []\napplications: []", "aplications: unknown key; allowed here: proxy_location, "),
    ],
)
def test_a_file_that_is_no_serve_config(tmp_path: Path, text: str, reason: str) -> None:
    message = refused(write(tmp_path, text))
    assert reason in message
    # Nothing of pydantic's own lines and links.
    assert "validation error" not in message


@pytest.mark.parametrize("content", [b"\xff\xfe\x00", b"a: 2026-99-99"], ids=["binary", "impossible date"])
def test_a_file_that_yaml_can_not_decode(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "config.yaml"
    path.write_bytes(content)
    refused(path)


def test_every_mistake_in_our_args_is_named_with_its_path(tmp_path: Path) -> None:
    message = refused(write(tmp_path, config(ingress={"max_prompts": 0}, modles=[])))
    assert "args.ingress.max_prompts: " in message
    assert "args.modles: unknown key; allowed here: models, ingress" in message


def test_keys_that_can_not_be_read_are_a_mistake_of_the_config(tmp_path: Path) -> None:
    keys = tmp_path / "keys.yaml"
    content = config(access={"keys_file": str(keys)})
    assert f"access.keys_file ({keys}): No such file or directory" in refused(write(tmp_path, content))
    keys.write_text("- {name: ada}")
    assert "[0].sha256: required, but missing" in refused(write(tmp_path, content))
    keys.write_text("[]")
    assert refused(write(tmp_path, content)) == ""


def test_keys_may_be_in_the_environment_that_the_config_gives(tmp_path: Path) -> None:
    content = config(access={"keys_env": "SATURATE_TEST_KEYS"})
    assert "no variable SATURATE_TEST_KEYS" in refused(write(tmp_path, content))
    content["applications"][0]["runtime_env"] = {"env_vars": {"SATURATE_TEST_KEYS": "[]"}}
    assert refused(write(tmp_path, content)) == ""


def test_the_part_of_the_config_that_running_engines_take_in_is_checked_too(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["deployments"] = [
        {"name": "Engine:demo", "user_config": {"batcher": {"x": 1}}}
    ]
    assert "user_config.batcher.x: unknown key; allowed here: capacity_tokens" in refused(
        write(tmp_path, content)
    )
    # The user_config of a function is for the function.
    function = {"id": "other", "kind": "function", "target": "no.such.module:Class"}
    content["applications"][0]["args"]["models"].append(function)
    content["applications"][0]["deployments"][0]["name"] = "Engine:other"
    assert refused(write(tmp_path, content)) == ""


def test_a_model_on_several_gpus_reserves_as_many(tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "configs/llama3-70b-4xa100.yaml").read_text())
    (app,) = content["applications"]
    (model,) = app["args"]["models"]
    options = app["deployments"][1]["ray_actor_options"]
    model["engine"] |= {"tensor_parallel_size": 2, "pipeline_parallel_size": 2}
    assert refused(write(tmp_path, content)) == ""
    options["num_gpus"] = 1
    assert (
        "deployments: Engine:llama3-70b: ray_actor_options.num_gpus: 1: must be 4, as tensor_parallel_size 2 "
        "and pipeline_parallel_size 2 take a GPU per process"
    ) in refused(write(tmp_path, content))
    # On a CPU, processes take no GPU.
    options["num_gpus"] = 0
    assert refused(write(tmp_path, content)) == ""


def test_a_model_on_several_nodes_leaves_its_gpus_to_its_workers(tmp_path: Path) -> None:
    content = yaml.safe_load((ROOT / "configs/llama3-70b-4xa100.yaml").read_text())
    (app,) = content["applications"]
    (model,) = app["args"]["models"]
    del model["engine"]["distributed_executor_backend"]
    model["nodes"] = 2
    text = "deployments: Engine:llama3-70b: ray_actor_options.num_gpus: 4: must be left out, as the workers"
    assert text in refused(write(tmp_path, content))
    del app["deployments"][1]["ray_actor_options"]["num_gpus"]
    assert refused(write(tmp_path, content)) == ""


def test_another_application_s_args_are_not_ours_to_check(tmp_path: Path) -> None:
    content = config()
    other = {"name": "o", "route_prefix": "/o", "import_path": "o:build", "args": {"x": 1}}
    content["applications"].append(other)
    assert refused(write(tmp_path, content)) == ""


def test_the_format_goes_into_the_config_and_leaves_the_rest() -> None:
    ours = {"import_path": "serve_app.app:build", "args": {"models": [], "telemetry": {"tenants": 3}}}
    theirs = {"import_path": "other:app", "args": {}}
    config = ServeDeploySchema.model_validate(
        {"applications": [ours | {"name": "a", "route_prefix": "/a"}, theirs]}
    )
    set_request_log(config, "text")
    assert [app.args for app in config.applications] == [
        {"models": [], "telemetry": {"tenants": 3, "request_log": "text"}},
        {},
    ]
