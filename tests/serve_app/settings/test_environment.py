"""The environment of Ray's processes."""

import json
import subprocess
import sys

from serve_app.settings.environment import HOOK, MESSAGES, prepare_ray

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
