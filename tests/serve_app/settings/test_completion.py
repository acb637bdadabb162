"""The variables that a short config leaves out."""

import copy
from typing import Any

import pytest

from serve_app.settings.completion import complete_config, missing_variables
from serve_app.settings.environment import CONTROLLER, HOOK, MESSAGES, REPLICAS

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


def test_a_short_config_gets_both_places_and_is_left_as_it_was() -> None:
    config = short(QWEN)
    before = copy.deepcopy(config)
    whole = complete_config(config)
    assert config == before
    assert controller(whole) == {HOOK: CONTROLLER.value}
    assert replicas(whole)[HOOK] == REPLICAS.value
    whole.pop("controller_options")
    whole["applications"][0].pop("runtime_env")
    assert whole == before


def test_a_complete_config_misses_nothing() -> None:
    whole = complete_config(short(QWEN))
    assert not missing_variables(whole)
    assert complete_config(whole) == whole


def test_a_value_of_the_config_is_kept() -> None:
    config = short(QWEN, runtime_env={"working_dir": "w", "env_vars": {MESSAGES.name: "5", "MINE": "x"}})
    config["controller_options"] = {"runtime_env": {"env_vars": {"RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S": "7"}}}
    whole = complete_config(config)
    assert whole["applications"][0]["runtime_env"]["working_dir"] == "w"
    assert replicas(whole).items() >= {MESSAGES.name: "5", "MINE": "x", HOOK: REPLICAS.value}.items()
    assert controller(whole)["RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S"] == "7"


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
@pytest.mark.parametrize("name", [HARD_STOP, HAPROXY])
def test_what_both_must_agree_on_is_taken_from_the_place_that_sets_it(name: str, host: str) -> None:
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
    whole = complete_config(short(DEMO, host=host))
    assert (DRAINING in replicas(whole)) == alone


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
    whole = complete_config(short(DEMO, model))
    assert ("HF_HUB_OFFLINE" in replicas(whole)) == offline


def test_applications_of_others_are_left_alone() -> None:
    theirs = {"name": "o", "route_prefix": "/o", "import_path": "o:build"}
    assert complete_config({"applications": [theirs]}) == {"applications": [theirs]}
    config = short(QWEN)
    config["applications"].insert(0, theirs)
    whole = complete_config(config)
    assert whole["applications"][0] == theirs
    assert (replicas(whole, 1)[HOOK], controller(whole)[HOOK]) == (REPLICAS.value, CONTROLLER.value)


@pytest.mark.parametrize(
    "config",
    [{}, {"applications": 3}, {"applications": [1]}, {"applications": None, "controller_options": [1]}],
)
def test_a_config_without_an_application_of_ours_stays(config: dict[str, Any]) -> None:
    assert complete_config(config) == config


def test_parts_of_a_wrong_type_count_as_left_out() -> None:
    config = short(QWEN, args={"models": 3, "ingress": []}, deployments=[7, {"ray_actor_options": 2}])
    config["http_options"] = None
    assert replicas(complete_config(config))[HOOK] == REPLICAS.value
