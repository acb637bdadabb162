"""Environment of Ray's processes: each variable, its value and the reason for it.

The process that starts Ray sets one variable, `HOOK`, and all processes of Ray inherit the variable. `HOOK`
names a setup function, which Ray calls in each of its processes before Ray Serve is imported. The function
sets the variables that Ray Serve reads at its import. A variable that the environment of the machine or a
config sets keeps its value.
"""

import os
import sys
from collections.abc import MutableMapping
from dataclasses import dataclass


@dataclass(frozen=True)
class Variable:
    """An environment variable of Ray's processes.

    Attributes:
        name: Its name.
        value: Its value.
        reason: Its effect, and why it has this value; empty: see the variable before it.
    """

    name: str
    value: str
    reason: str = ""


HOOK = Variable(
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
    "serve_app.ingress.haproxy.prepare",
    "The function that sets the other variables. Ray's public setting for it applies to whole jobs only.",
)

HAPROXY = Variable(
    "RAY_SERVE_ENABLE_HA_PROXY",
    "1",
    "HTTP through HAProxy, handle calls over gRPC. Set all three: without HAProxy the second variable moves "
    "all HTTP to the head node.",
)
TRANSPORT = (
    HAPROXY,
    Variable("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),
    Variable("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1"),
)
"""The path of a request: proxy and transport of calls."""

CONNECTIONS = Variable(
    "RAY_SERVE_HAPROXY_MAXCONN",
    "12000",
    "Maximum connections of a node's HAProxy, or fewer where its limit of open files (two for each "
    "connection) is lower. A client address may have a quarter of them; name a proxy in front in "
    "SATURATE_HAPROXY_TRUSTED_PROXIES.",
)
PROXY = (
    Variable(
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
        "120",
        "Seconds that a client may be idle while it sends a request or reads an answer.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_RETRIES",
        "8",
        "Further Ingress replicas that a request is sent to while none accepts the connection. A request "
        "that an Ingress replica had when it died is not sent on: it may be the cause.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT",
        "1",
        "A replica that refuses one connection gets no more until it passes health checks. An old HAProxy "
        "process, which still serves connections from before a change, then uses Serve's own proxy.",
    ),
    Variable(
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
        "1",
        "Seconds between two health checks of HAProxy. Serve starts another HAProxy after the third failure.",
    ),
    CONNECTIONS,
)
"""Timeouts, retries and limits of HAProxy."""

START_LIMITS = (
    Variable(
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
        "60",
        "Start timeouts in seconds, long enough for a busy machine: of Serve's proxy until it answers, three "
        "times over, and of HAProxy until it listens. Ray Serve's default of 5 s ends a proxy that only "
        "starts slowly.",
    ),
    Variable("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", "120"),
    Variable(
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
        "30",
        "Seconds that the proxy has for the answer to a health check.",
    ),
)
"""Timeouts of Ray Serve's proxy, longer than Ray Serve's defaults."""

RAY = {
    HOOK.name: HOOK.value,
    "RAY_raylet_start_wait_time_s": "360",
    "RAY_gcs_server_port_wait_time_s": "360",
    "RAY_gcs_rpc_server_connect_timeout_s": "180",
    "RAY_py_gcs_connect_timeout_s": "180",
    "RAY_worker_register_timeout_seconds": "540",
    "RAY_agent_register_timeout_ms": "900000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "540",
    "RAY_USAGE_STATS_ENABLED": "0",
    # By default Ray gives its workers, and so the engine, a lower priority than other processes.
    "RAY_worker_niceness": "0",
    # Workers that start before they are asked for lack the environment of Serve's actors.
    "RAY_prestart_worker_first_driver": "0",
}
"""Variables of a Ray that `saturate serve` starts.

The timeouts of Ray's processes are longer than Ray's own: Ray gives the raylet 30 s, and a connection to its
GCS 5 s, which a busy machine with two cores exceeds.
"""

HARD_STOP = Variable(
    "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
    "900",
    "Longest stream, in seconds. When replicas come or go, HAProxy reloads and ends the answers that still "
    "run after this time.",
)
ANSWERS = (
    HARD_STOP,
    Variable(
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S",
        "600",
        "Seconds without a byte of the answer. A request may wait that long in the queue or for a replica to "
        "start.",
    ),
)
"""Timeouts of an answer."""

CLIENT_HEADERS = Variable(
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "serve_app.ingress.header_filter:middlewares",
    "Removes headers of a client that Ray Serve would trust, keeps uvicorn from trusting X-Forwarded-For, "
    "and sends no chunks to clients of HTTP/1.0.",
)
MESSAGES = Variable(
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    str(2**31 - 1),
    "Largest gRPC message in bytes: no limit but `ingress.max_body_bytes`. gRPC's own default is 4 MiB.",
)
THREADS = Variable(
    "VLLM_CPU_OMP_THREADS_BIND",
    "nobind",
    "On a CPU vLLM doesn't pin its threads to cores, which it shares with Ray's actors.",
)
NO_REPORTS = Variable("VLLM_NO_USAGE_STATS", "1", "No usage reports of vLLM.")

VARIABLES = (*TRANSPORT, CLIENT_HEADERS, *ANSWERS, *PROXY, *START_LIMITS, MESSAGES, THREADS, NO_REPORTS)
"""The variables that the setup function sets."""

DRAINING = Variable(
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "3",
    "Seconds that an Ingress replica waits before it stops, so that HAProxy has removed it. 3 s are enough "
    "on one machine; Ray Serve's default is 30.",
)
OFFLINE = Variable("HF_HUB_OFFLINE", "1", "No downloads from Hugging Face, and no usage reports.")
"""Further variables of a Ray that `saturate serve` starts: `DRAINING`, as that Ray has one machine, and
`OFFLINE` if no model needs a download."""


def prepare_ray(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the variables of a Ray that this process will start; Ray reads some of them when it is imported."""
    for name, value in RAY.items():
        environment.setdefault(name, value)


def set_variables(environment: MutableMapping[str, str]) -> None:
    """Set `VARIABLES` in an environment, except for the variables that it has.

    Raises:
        RuntimeError: Ray Serve is loaded already, and would ignore them.
    """
    if "ray.serve._private.constants" in sys.modules:
        raise RuntimeError("Ray Serve was loaded before its environment could be prepared")
    for variable in VARIABLES:
        environment.setdefault(variable.name, variable.value)
