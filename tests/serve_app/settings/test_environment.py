"""The environment of Ray's processes, and its check at the start of an application."""

import json
import logging
import subprocess
import sys
from typing import Any

import pytest

from serve_app.app import NEEDED, check_environment
from serve_app.settings.environment import HOOK, MESSAGES, prepare_ray
from serve_app.settings.schema import SettingsError, parse

DEMO = {"id": "demo", "source": "saturate://demo"}
HARD_STOP = "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S"
HAPROXY = "RAY_SERVE_ENABLE_HA_PROXY"


def test_a_ray_that_is_started_here_prepares_its_processes() -> None:
    environment: dict[str, str] = {}
    prepare_ray(environment)
    assert environment[HOOK.name] == "serve_app.ingress.haproxy.prepare"


def test_ray_serve_reads_the_variables_and_a_value_that_is_set_stays() -> None:
    """In a process of its own, as Ray calls the function; a second call there comes too late."""
    script = """
import json, sys
from serve_app.ingress.haproxy import prepare
from serve_app.settings.environment import VARIABLES
prepare()
print("ray.serve" in sys.modules)
import ray.serve._private.constants as constants
import ray.serve._private.haproxy as haproxy
names = [one.name for one in VARIABLES if one.name.startswith("RAY_SERVE_")]
print(json.dumps({name: str(getattr(constants, name, None)) for name in names}))
print("saturate_addresses" in haproxy.HAPROXY_CONFIG_TEMPLATE)
late = {}
try:
    prepare(late)
except RuntimeError as error:
    print(error, HARD in late)
"""
    script = script.replace("HARD", repr(HARD_STOP))
    environment = {"PATH": "/usr/bin:/bin", HARD_STOP: "77"}
    command = [sys.executable, "-c", script]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, env=environment, text=True)
    loaded, first, limited, second = done.stdout.splitlines()
    read = json.loads(first)
    assert read[HAPROXY] == read["RAY_SERVE_USE_GRPC_BY_DEFAULT"] == "True"
    assert (read[HARD_STOP], read[MESSAGES.name]) == ("77", str(2**31 - 1))
    assert (loaded, limited) == ("False", "True")
    assert second == "Ray Serve was loaded before its environment could be prepared False"


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
def test_missing_variables_are_one_warning_with_the_fix(
    args: Any, environment: dict[str, str], warned: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    check_environment(parse(args), environment)
    said = [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]
    assert len(said) == bool(warned)
    if warned:
        assert f"lacks {', '.join(warned)}. " in said[0]
        assert f"{HOOK.name}={HOOK.value}" in said[0]


def test_api_keys_are_refused_where_a_client_could_claim_any_address() -> None:
    callback = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
    with pytest.raises(SettingsError, match=rf"^access: .*{callback}.*{HOOK.name}"):
        check_environment(parse(KEYS), without(callback))
