"""The needs of a config."""

from pathlib import Path

import pytest
import yaml

from serve_app.cli.checks.needs import Deployment, Needs, read_needs
from tests.serve_app.cli.services import config, write

ROOT = Path(__file__).parents[4]
OFFLINE = {"local.yaml", "embeddings.yaml", "simulated.yaml"}


def test_the_needs_of_a_config_of_this_project() -> None:
    needs = read_needs(ROOT / "configs/qwen2.5-7b-l4.yaml")
    assert (needs.host, needs.port, needs.haproxy) == ("0.0.0.0", 8000, True)
    assert [model.id for model in needs.llms] == ["qwen2.5-7b"]
    # A model that is scaled to zero needs a replica's share once it wakes up.
    assert needs.deployments == (
        Deployment("Ingress", 1, 1.0, 0.0),
        Deployment("Engine:qwen2.5-7b", 1, 4.0, 1.0),
    )
    assert needs.gpus_of("qwen2.5-7b") == 1.0
    assert needs.gpus_of("another") == 0.0


@pytest.mark.parametrize(
    ("path", "offline"),
    [(path.name, path.name in OFFLINE) for path in sorted((ROOT / "configs").glob("*.yaml"))],
)
def test_every_config_of_this_project_can_be_read(path: str, offline: bool) -> None:
    needs = read_needs(ROOT / "configs" / path)
    assert needs.models
    assert len(needs.deployments) == len(needs.models) + 1
    if offline:
        assert needs.variable("HF_HUB_OFFLINE", {}) == "1"


def test_a_deployment_that_says_nothing_has_a_replica_with_a_core(tmp_path: Path) -> None:
    needs = read_needs(write(tmp_path, config(1234)))
    assert (needs.port, needs.haproxy) == (1234, True)
    assert needs.deployments == (Deployment("Ingress", 1, 1.0, 0.0), Deployment("Engine:demo", 1, 1.0, 0.0))


def test_the_files_of_keys_are_needed(tmp_path: Path) -> None:
    needs = read_needs(write(tmp_path, config(access={"keys_file": "/k"})))
    assert needs.keys_files == (Path("/k"),)


def test_replicas_are_those_of_the_start(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["deployments"] = [
        {"name": "Ingress", "num_replicas": 3, "ray_actor_options": {"num_cpus": 0.5}},
        {"name": "Engine:demo", "autoscaling_config": {"min_replicas": 1, "initial_replicas": 2}},
    ]
    assert [one.replicas for one in read_needs(write(tmp_path, content)).deployments] == [3, 2]


def test_a_config_may_do_without_haproxy(tmp_path: Path) -> None:
    content = config()
    content["controller_options"] = {"runtime_env": {"env_vars": {"RAY_SERVE_ENABLE_HA_PROXY": "0"}}}
    assert not read_needs(write(tmp_path, content)).haproxy


def test_variables_of_the_config_go_before_those_of_the_environment(tmp_path: Path) -> None:
    content = config()
    content["applications"][0]["runtime_env"] = {"env_vars": {"HF_HUB_OFFLINE": 1}}
    needs = read_needs(write(tmp_path, content))
    environment = {"HF_HUB_OFFLINE": "0", "HF_HOME": "/data"}
    assert needs.variable("HF_HUB_OFFLINE", environment) == "1"
    assert needs.variable("HF_HOME", environment) == "/data"
    assert needs.variable("HF_TOKEN", environment) == ""


@pytest.mark.parametrize(
    "content",
    ["[", "1", "applications: 3", "applications: [1]", "http_options: [1]\napplications: [{import_path: x}]"],
)
def test_what_is_wrong_is_left_out(tmp_path: Path, content: str) -> None:
    needs = read_needs(write(tmp_path, content))
    assert (needs.port, needs.models, needs.deployments) == (8000, (), ())


def test_wrong_args_leave_the_rest(tmp_path: Path) -> None:
    needs = read_needs(write(tmp_path, yaml.safe_dump(config(1234, nonsense=1))))
    assert (needs.port, needs.models) == (1234, ())


def test_a_file_that_is_not_there(tmp_path: Path) -> None:
    assert read_needs(tmp_path / "no.yaml") == Needs(tmp_path / "no.yaml")
