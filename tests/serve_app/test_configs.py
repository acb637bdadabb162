"""Every config in configs/ is valid, agrees with itself, and has a comment for every value.

What `saturate serve` adds to a config is a part of it here.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from ray.serve._private.build_app import build_app
from ray.serve.schema import ServeDeploySchema

from serve_app.app import build
from serve_app.cli.serve_config import read_config
from serve_app.engine.autoscaling import ByTokens
from serve_app.settings.config_file import IMPORT_PATH
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import parse

FOLDER = Path(__file__).parents[2] / "configs"
CONFIGS = sorted(FOLDER.glob("*.yaml"))

every_config = pytest.mark.parametrize("path", CONFIGS, ids=[path.name for path in CONFIGS])


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


def env_vars(section: Any) -> dict[str, str]:
    variables: dict[str, str] = section.get("runtime_env", {}).get("env_vars", {})
    return variables


def test_there_are_configs() -> None:
    assert FOLDER / "local.yaml" in CONFIGS


def test_the_local_config_has_batches() -> None:
    (app,) = ServeDeploySchema.model_validate(load(FOLDER / "local.yaml")).applications
    assert parse(app.args).batches is not None


@every_config
def test_the_config_is_valid(path: Path) -> None:
    config = ServeDeploySchema.model_validate(load(path))
    assert [app.import_path for app in config.applications] == [IMPORT_PATH]
    parse(config.applications[0].args)
    assert read_config(path) == config


@every_config
def test_its_deployments_exist(path: Path) -> None:
    (app,) = ServeDeploySchema.model_validate(load(path)).applications
    there = {deployment.name for deployment in build_app(build(app.args), name=app.name).deployments}
    named = [deployment.name for deployment in app.deployments]
    assert len(named) == len(set(named))
    assert set(named) <= there


@every_config
def test_a_replica_is_full_before_another_one_starts(path: Path) -> None:
    config = load(path)["applications"][0]
    engines = {f"Engine:{model['id']}": model.get("engine", {}) for model in config["args"]["models"]}
    for deployment in config["deployments"]:
        scaling = deployment.get("autoscaling_config")
        if scaling and deployment["name"] in engines:
            # vLLM's own number on these GPUs.
            least = engines[deployment["name"]].get("max_num_seqs", 256)
            assert scaling["target_ongoing_requests"] >= least


OPTION = re.compile(
    r"^( +)# (goals: .*|tenant_weights: .*|policy:|  policy_function: .*|  policy_kwargs: .*)$", re.M
)
"""A commented-out option of a config."""


@pytest.mark.parametrize("name", ["qwen2.5-7b-l4.yaml", "llama3-8b-a100.yaml", "llama3-70b-4xa100.yaml"])
def test_commented_out_options_are_valid(name: str) -> None:
    text, count = OPTION.subn(r"\1\2", (FOLDER / name).read_text())
    assert count == 5
    (app,) = ServeDeploySchema.model_validate(yaml.safe_load(text)).applications
    (model,) = parse(app.args).models
    assert isinstance(model, LLMSettings)
    assert model.batcher.goals is not None
    assert model.batcher.tenant_weights
    engine = app.deployments[1].autoscaling_config
    assert isinstance(engine, dict)
    assert engine["policy"]["policy_function"] == "serve_app.engine.autoscaling:ByTokens"
    ByTokens(**engine["policy"]["policy_kwargs"])


@every_config
def test_environment_variables_are_strings(path: Path) -> None:
    config = load(path)
    for section in (config.get("controller_options", {}), *config["applications"]):
        for name, value in env_vars(section).items():
            assert isinstance(value, str), name


def test_the_local_config_needs_no_gpu_no_download_and_stays_local() -> None:
    config = load(FOLDER / "local.yaml")
    assert config["http_options"]["host"] == "127.0.0.1"
    (app,) = config["applications"]
    assert [model["source"] for model in app["args"]["models"]] == ["saturate://demo"]
    for deployment in app["deployments"]:
        assert "num_gpus" not in deployment.get("ray_actor_options", {})


# Comments


def unexplained(text: str) -> list[str]:
    """Return the lines with a value that no comment covers.

    A comment covers the line that it is on or right above, the lines nested below that line, and the lines
    that follow right after it at the same depth.
    """
    found = []
    explained: dict[
        int, bool
    ] = {}  # By depth: whether the line that the next one may be nested below is covered.
    previous = -1
    commented = False
    for line in text.splitlines():
        content = line.strip()
        if not content or content.startswith("#"):
            commented = bool(content)
            previous = -1
            continue
        starts_item = content.startswith("- ")
        depth = len(line) - len(content) + 2 * starts_item
        follows = previous == depth and not starts_item and explained[depth]
        explained = {at: value for at, value in explained.items() if at < depth}
        explained[depth] = commented or " #" in line or follows or any(explained.values())
        if not explained[depth] and not content.endswith(":"):
            found.append(line)
        previous = depth
        commented = False
    return found


@every_config
def test_every_value_has_a_comment(path: Path) -> None:
    assert unexplained(path.read_text()) == []


def test_the_check_of_comments_finds_one_that_is_missing() -> None:
    text = """
# About the file.

# The address.
http:
  host: a
  port: 1

plain: 2
on_line: 3  # why
next: 4

list:
  # The first.
  - name: x
    size: 4
  - name: y
    deep:
      # One.
      one: 1
      two: 2
    other: 5
"""
    assert unexplained(text) == ["plain: 2", "  - name: y", "    other: 5"]
