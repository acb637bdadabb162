"""The environment that the functions of a config set, and the configs that name them."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.settings.completion import complete_config
from serve_app.settings.environment import OF_CONTROLLER, OF_REPLICAS, prepare, set_variables

FOLDER = Path(__file__).parents[3] / "configs"

every_file = pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)


def load(path: Path) -> Any:
    return yaml.safe_load(path.read_text())


@every_file
def test_each_file_is_complete(path: Path) -> None:
    assert complete_config(load(path)) == load(path)


def test_the_controller_and_the_replicas_agree() -> None:
    controller, replicas = ({one.name: one.value for one in each} for each in (OF_CONTROLLER, OF_REPLICAS))
    both = controller.keys() & replicas.keys()
    assert len(both) == 6
    assert {name: controller[name] for name in both} == {name: replicas[name] for name in both}


def test_a_value_that_is_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    # pytest has loaded Ray Serve.
    monkeypatch.delitem(sys.modules, "ray.serve._private.constants", raising=False)
    environment = {"RAY_SERVE_ENABLE_HA_PROXY": "0"}
    set_variables(OF_REPLICAS, environment)
    assert environment.pop("RAY_SERVE_ENABLE_HA_PROXY") == "0"
    assert environment == {one.name: one.value for one in OF_REPLICAS if one.name in environment}
    assert len(environment) == len(OF_REPLICAS) - 1


def test_a_process_that_has_loaded_ray_serve_is_refused() -> None:
    import ray.serve._private.constants  # noqa: F401

    environment: dict[str, str] = {}
    with pytest.raises(RuntimeError, match="Ray Serve was loaded before"):
        prepare(environment)
    assert environment == {}


def test_ray_serve_reads_what_the_function_sets() -> None:
    """In a process of its own, as Ray calls the function."""
    names = [one.name for one in OF_REPLICAS if one.name.startswith("RAY_SERVE_")]
    script = (
        "import json; from serve_app.settings.environment import prepare; prepare(); "
        "import ray.serve._private.constants as c; "
        f"print(json.dumps([str(getattr(c, name, None)) for name in {names}]))"
    )
    environment = {"PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", script], stdout=subprocess.PIPE, check=True, env=environment)
    read = dict(zip(names, json.loads(done.stdout), strict=True))
    assert read["RAY_SERVE_ENABLE_HA_PROXY"] == read["RAY_SERVE_USE_GRPC_BY_DEFAULT"] == "True"
    assert read["RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"] == "900"
    assert read["RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"] == str(2**31 - 1)
