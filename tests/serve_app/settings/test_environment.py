"""The environment of the controller and the replicas: what a short config leaves out, and its check."""

import copy
import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from serve_app.settings.completion import complete_config, missing_variables
from serve_app.settings.environment import (
    CONTROLLER,
    HOOK,
    MESSAGES,
    OF_CONTROLLER,
    OF_REPLICAS,
    REPLICAS,
    SHARED,
)
from serve_app.settings.environment_check import NEEDED, check_environment
from serve_app.settings.schema import SettingsError, parse

FOLDER = Path(__file__).parents[3] / "configs"
DEMO = {"id": "demo", "source": "saturate://demo"}
QWEN = {"id": "qwen", "source": "Qwen/Qwen2.5-7B-Instruct"}
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"
DRAINING = "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"


def short(*models: dict[str, Any], host: str | None = "127.0.0.1", **app: Any) -> dict[str, Any]:
    ours = {"name": "llm", "import_path": "serve_app.app:build", "args": {"models": list(models)}, **app}
    return {"http_options": {"port": 8000} | ({} if host is None else {"host": host}), "applications": [ours]}


def controller(config: dict[str, Any]) -> dict[str, str]:
    variables: dict[str, str] = config["controller_options"]["runtime_env"]["env_vars"]
    return variables


def replicas(config: dict[str, Any], index: int = 0) -> dict[str, str]:
    variables: dict[str, str] = config["applications"][index]["runtime_env"]["env_vars"]
    return variables


# Completion


def test_a_short_config_gets_both_places_and_is_left_as_it_was() -> None:
    config = short(QWEN)
    before = copy.deepcopy(config)
    whole = complete_config(config)
    assert config == before
    assert controller(whole) == {HOOK: CONTROLLER.value}
    assert replicas(whole)[HOOK] == REPLICAS.value
    assert not missing_variables(whole)
    assert complete_config(whole) == whole
    whole.pop("controller_options")
    whole["applications"][0].pop("runtime_env")
    assert whole == before


@pytest.mark.parametrize("path", sorted(FOLDER.glob("*.yaml")), ids=lambda path: path.name)
def test_each_config_of_the_repository_is_complete(path: Path) -> None:
    config = yaml.safe_load(path.read_text())
    assert complete_config(config) == config


def test_a_value_of_the_config_is_kept() -> None:
    config = short(QWEN, runtime_env={"working_dir": "w", "env_vars": {MESSAGES.name: "5", "MINE": "x"}})
    config["controller_options"] = {"runtime_env": {"env_vars": {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "7"}}}
    whole = complete_config(config)
    assert whole["applications"][0]["runtime_env"]["working_dir"] == "w"
    assert replicas(whole).items() >= {MESSAGES.name: "5", "MINE": "x", HOOK: REPLICAS.value}.items()
    assert controller(whole)["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "7"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("name", [HARD_STOP, HAPROXY])
def test_a_shared_value_is_copied_from_the_place_that_sets_it(name: str, host: str) -> None:
    theirs = complete_config(short(DEMO, host=host, runtime_env={"env_vars": {name: "77"}}))
    assert controller(theirs)[name] == "77"
    ours = short(DEMO, host=host)
    ours["controller_options"] = {"runtime_env": {"env_vars": {name: "78"}}}
    assert replicas(complete_config(ours))[name] == "78"


@pytest.mark.parametrize(
    ("host", "alone"),
    [("127.0.0.1", True), ("localhost", True), ("::1", True), ("0.0.0.0", False), (None, False)],
)
def test_a_service_on_loopback_has_one_machine(host: str | None, alone: bool) -> None:
    assert (DRAINING in replicas(complete_config(short(DEMO, host=host)))) == alone


@pytest.mark.parametrize(
    ("model", "offline"),
    [
        (DEMO, True),
        (QWEN, False),
        ({"id": "s", "simulate": "h100-8b"}, True),
        ({"id": "f", "kind": "function", "target": "serve_app.demo.minilm:MiniLM"}, True),
        ({"id": "f", "kind": "function", "target": "mine:Model"}, False),
        ({"id": "d", "source": "/models/mine"}, False),
    ],
)
def test_a_model_that_may_be_downloaded_reaches_the_hub(model: dict[str, Any], offline: bool) -> None:
    assert ("HF_HUB_OFFLINE" in replicas(complete_config(short(DEMO, model)))) == offline


def test_an_application_of_another_project_is_left_alone() -> None:
    theirs = {"name": "o", "route_prefix": "/o", "import_path": "o:build"}
    config = short(QWEN)
    config["applications"].insert(0, theirs)
    whole = complete_config(config)
    assert whole["applications"][0] == theirs
    assert (replicas(whole, 1)[HOOK], controller(whole)[HOOK]) == (REPLICAS.value, CONTROLLER.value)


@pytest.mark.parametrize(
    "config",
    [
        {},
        {"applications": 3},
        {"applications": [1, {"import_path": "o:build"}]},
        {"applications": None, "controller_options": [1]},
    ],
)
def test_a_config_without_an_application_of_ours_stays(config: dict[str, Any]) -> None:
    assert complete_config(config) == config


def test_parts_of_a_wrong_type_count_as_left_out() -> None:
    config = short(QWEN, args={"models": 3, "ingress": []}, deployments=[7, {"ray_actor_options": 2}])
    config["http_options"] = None
    assert replicas(complete_config(config))[HOOK] == REPLICAS.value


# Processes of Ray


def test_the_controller_and_the_replicas_agree() -> None:
    places = ({one.name: one.value for one in each} for each in (OF_CONTROLLER, OF_REPLICAS))
    common = set.intersection(*({*place.items()} for place in places))
    assert common == {(one.name, one.value) for one in SHARED}


def test_ray_serve_reads_the_variables_and_a_value_that_is_set_stays() -> None:
    """In a process of its own, as Ray calls the function; a second call there comes too late."""
    script = """
import json
from serve_app.settings.environment import OF_REPLICAS, prepare
prepare()
import ray.serve._private.constants as constants
names = [one.name for one in OF_REPLICAS if one.name.startswith("RAY_SERVE_")]
print(json.dumps({name: str(getattr(constants, name, None)) for name in names}))
late = {}
try:
    prepare(late)
except RuntimeError as error:
    print(error, late)
"""
    environment = {"PATH": "/usr/bin:/bin", HARD_STOP: "77"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True)
    first, second = done.stdout.splitlines()
    read = json.loads(first)
    assert read[HAPROXY] == read["RAY_SERVE_USE_GRPC_BY_DEFAULT"] == "True"
    assert (read[HARD_STOP], read[MESSAGES.name]) == ("77", str(2**31 - 1))
    assert second == "Ray Serve was loaded before its environment could be prepared {}"


# The check at the start of an application

KEYS = {"models": [DEMO], "access": {"keys_env": "KEYS"}}
WHOLE = dict.fromkeys(NEEDED, "any")


def without(*names: str) -> dict[str, str]:
    return {name: value for name, value in WHOLE.items() if name not in names}


@pytest.mark.parametrize(
    ("args", "environment", "warned"),
    [
        (KEYS, WHOLE | {HAPROXY: "0"}, []),
        ({"models": [DEMO]}, {}, NEEDED),
        # Without HAProxy the keys hold.
        (KEYS, without(HAPROXY), [HAPROXY]),
    ],
)
def test_missing_variables_are_one_warning_with_the_command(
    args: Any, environment: dict[str, str], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    check_environment(parse(args), environment)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(warned)
    if warned:
        assert f"lacks {', '.join(warned)}. " in said[0]
        assert "`saturate serve CONFIG --print-config > complete.yaml`" in said[0]


def test_api_keys_are_refused_where_a_client_could_claim_any_address() -> None:
    callback = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    with pytest.raises(SettingsError, match=rf"^access: .*{callback}.*--print-config"):
        check_environment(parse(KEYS), without(callback))
