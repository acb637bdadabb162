"""The variables of a config, against those that each file in configs/ has or gets."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.settings.completion import complete_config
from serve_app.settings.environment import Variable, controller_variables, replica_variables

FOLDER = Path(__file__).parents[3] / "configs"

KINDS: dict[str, dict[str, bool]] = {
    "local.yaml": {"long_answers": False, "one_machine": True, "cpu": True, "offline": True},
    "embeddings.yaml": {"long_answers": False, "one_machine": True, "cpu": True, "offline": True},
    "simulated.yaml": {"long_answers": False, "one_machine": True, "cpu": True, "offline": True},
    "demo-cluster.yaml": {"long_answers": True, "one_machine": False, "cpu": True, "offline": True},
    "qwen2.5-7b-l4.yaml": {"long_answers": True, "one_machine": False, "cpu": False, "offline": False},
    "llama3-8b-a100.yaml": {"long_answers": True, "one_machine": False, "cpu": False, "offline": False},
    "llama3-70b-4xa100.yaml": {"long_answers": True, "one_machine": False, "cpu": False, "offline": False},
}
"""What each file is for."""

every_file = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)


def values(variables: tuple[Variable, ...]) -> list[tuple[str, str]]:
    return [(variable.name, variable.value) for variable in variables]


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@every_file
def test_the_controller_of_each_file_agrees(path: Path) -> None:
    written = complete_config(load(path))["controller_options"]["runtime_env"]["env_vars"]
    wanted = controller_variables(long_answers=KINDS[path.name]["long_answers"])
    assert list(written.items()) == values(wanted)


@every_file
def test_the_replicas_of_each_file_agree(path: Path) -> None:
    for app in complete_config(load(path))["applications"]:
        assert list(app["runtime_env"]["env_vars"].items()) == values(replica_variables(**KINDS[path.name]))


@every_file
def test_only_the_file_for_plain_serve_run_repeats_them(path: Path) -> None:
    complete_file = path.name == "local.yaml"
    assert (complete_config(load(path)) == load(path)) == complete_file
    assert ("env_vars" in path.read_text()) == complete_file


@pytest.mark.parametrize("long_answers", [True, False])
def test_what_both_have_is_the_same(long_answers: bool) -> None:
    controller = dict(values(controller_variables(long_answers=long_answers)))
    replicas = dict(
        values(replica_variables(long_answers=long_answers, one_machine=True, cpu=True, offline=True))
    )
    both = set(controller) & set(replicas)
    assert len(both) == (6 if long_answers else 4)
    assert {name: controller[name] for name in both} == {name: replicas[name] for name in both}
