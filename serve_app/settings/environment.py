"""Environment of Serve's controller and of the replicas: each variable, its value and the reason for it.

Ray Serve reads these variables from two places of a config, which must agree: the controller, which starts
HAProxy, and the replicas. `serve_app.settings.completion` adds them to a config that leaves them out.
"""

from dataclasses import dataclass, replace

CONTROLLER = (
    "Environment of Serve's controller, which starts HAProxy. The variables that `applications` below sets "
    "too must have the same values in both places."
)
REPLICAS = "Environment of the replicas; see controller_options."
"""The comments above the two places."""


@dataclass(frozen=True)
class Variable:
    """An environment variable of a config.

    Attributes:
        name: Its name.
        value: Its value.
        reason: The comment above it; empty: that of the variable before holds for it too.
    """

    name: str
    value: str
    reason: str = ""


TRANSPORT = (
    Variable(
        "RAY_SERVE_ENABLE_HA_PROXY",
        "1",
        "HTTP through HAProxy, handle calls over gRPC. Set all three: without HAProxy the second one moves "
        "all HTTP to the head node.",
    ),
    Variable("RAY_SERVE_THROUGHPUT_OPTIMIZED", "1"),
    Variable("RAY_SERVE_USE_GRPC_BY_DEFAULT", "1"),
)
"""For the controller and the replicas."""

HAPROXY = (
    Variable(
        "RAY_SERVE_HAPROXY_LOG_TARGET",
        "127.0.0.1:514 local0 emerg\n    nosplice\n    log 127.0.0.1:514",
        "Adds HAProxy's option `nosplice`, for which Ray Serve has no setting. With splicing, HAProxy 2.8 "
        "doesn't notice that a client disconnects while it waits for an answer, and the engine goes on.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_BALANCE_ALGORITHM",
        "leastconn\n    timeout http-request 30s",
        "Adds a limit for the head of a request in the same way: a client that sends it byte by byte loses "
        "its connection after 30 s.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_TIMEOUT_CLIENT_S",
        "120",
        "Seconds that a client may be idle while it sends a request or reads an answer.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_RETRY_ON",
        "conn-failure empty-response\n    option http-buffer-request\n    retries 8\n    option forwardfor",
        "If an Ingress replica dies before it answers, HAProxy sends the request to another one. It buffers "
        "the body for that; a body above the buffer (RAY_SERVE_HAPROXY_TUNE_BUFSIZE, 16 KiB) is sent once. "
        "`forwardfor` appends the client's address to X-Forwarded-For, for API keys with `allow_from`.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_OBSERVE_ERROR_LIMIT",
        "1",
        "A replica that refuses one connection gets no more until it passes health checks. An old HAProxy "
        "process, which still serves the connections of before a change, then turns to Serve's own proxy.",
    ),
    Variable(
        "RAY_SERVE_PROXY_HEALTH_CHECK_PERIOD_S",
        "1",
        "Seconds between two health checks of HAProxy. Serve starts another HAProxy after the third failure.",
    ),
)
"""For the controller, which starts HAProxy."""

PREPARATION = Variable(
    "__RAY_WORKER_PROCESS_SETUP_HOOK_ENV_VAR",
    "serve_app.ingress.haproxy.prepare",
    "Adds to HAProxy's configuration the limits for each address and each port, a private folder for its "
    "sockets, statistics on loopback (SATURATE_HAPROXY_STATISTICS_HOST), and errors in JSON.",
)
CONNECTIONS = Variable(
    "RAY_SERVE_HAPROXY_MAXCONN",
    "12000",
    "Connections of a node's HAProxy, or as many as its open files allow (two for each). An address of "
    "clients may have a quarter of them; name a proxy in front in SATURATE_HAPROXY_TRUSTED_PROXIES.",
)
LIMITS = (CONNECTIONS, PREPARATION)
"""For the controller; the processes of the proxies inherit its environment."""

START_LIMITS = (
    Variable(
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S",
        "60",
        "Seconds of a start, long enough for a busy machine: of Serve's proxy until it answers, three times "
        "over, and of HAProxy until it listens. Ray Serve's own 5 s end a proxy that only starts slowly.",
    ),
    Variable("RAY_SERVE_HAPROXY_STARTUP_TIMEOUT_S", "120"),
    Variable(
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S",
        "30",
        "Seconds that the proxy has for the answer to a health check.",
    ),
)
"""For the controller: the limits of Ray Serve for its proxy, longer."""

RAY_START_LIMITS = {
    "RAY_raylet_start_wait_time_s": "120",
    "RAY_gcs_server_port_wait_time_s": "120",
    "RAY_gcs_rpc_server_connect_timeout_s": "60",
    "RAY_py_gcs_connect_timeout_s": "60",
    "RAY_worker_register_timeout_seconds": "180",
    "RAY_agent_register_timeout_ms": "300000",
    "RAY_DASHBOARD_STARTUP_TIMEOUT_S": "180",
}
"""For the Ray that `saturate serve` starts: the limits of Ray's own processes, longer.

Ray gives the raylet 30 s, and a connection to its GCS 5 s, which a busy machine with two cores exceeds.
"""

PATIENCE = 3
"""Factor of these limits for a second try."""

PROXY_START_S = 300
"""Seconds that `serve run` waits for Ray Serve's proxy in a second try; Ray Serve's own 60 s in the first."""

LONG_ANSWERS = (
    Variable(
        "RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S",
        "900",
        "Longest stream, in seconds. When replicas come or go, HAProxy reloads and ends the answers that "
        "still run after this time.",
    ),
    Variable(
        "RAY_SERVE_HAPROXY_TIMEOUT_SERVER_S",
        "600",
        "Seconds without a byte of the answer. A request may wait that long in the queue or for a replica to "
        "start.",
    ),
)
"""For the controller and the replicas of models whose answers take minutes."""

CLIENT_HEADERS = Variable(
    "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH",
    "serve_app.ingress.header_filter:middlewares",
    "Removes headers of a client that Ray Serve would trust, and turns Ray Serve's own pages into errors in "
    "JSON.",
)
DRAINING = Variable(
    "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S",
    "3",
    "Seconds that an Ingress replica waits before it stops, so that HAProxy has removed it. 3 s are enough "
    "on one machine.",
)
MESSAGES = Variable(
    "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH",
    "67108864",
    "Largest gRPC message in bytes, above `ingress.max_body_bytes`; gRPC's default is 4 MiB.",
)
THREADS = Variable(
    "VLLM_CPU_OMP_THREADS_BIND",
    "nobind",
    "vLLM doesn't pin its threads to cores, which it shares with Ray's actors.",
)
OFFLINE = Variable("HF_HUB_OFFLINE", "1", "No downloads from Hugging Face, and no usage reports.")
NO_REPORTS = Variable("VLLM_NO_USAGE_STATS", "1", "No usage reports of vLLM.")


def controller_variables(*, long_answers: bool) -> tuple[Variable, ...]:
    """Return the variables of `controller_options`.

    Args:
        long_answers: Answers may take minutes; else two minutes, Ray Serve's default.
    """
    answers = LONG_ANSWERS if long_answers else ()
    return (*TRANSPORT, *HAPROXY, *LIMITS, CLIENT_HEADERS, *START_LIMITS, *answers)


def replica_variables(
    *, long_answers: bool, one_machine: bool, cpu: bool, offline: bool, largest_body: int = 0
) -> tuple[Variable, ...]:
    """Return the variables of an application's replicas.

    Args:
        long_answers: As for the controller.
        one_machine: No other machine has replicas.
        cpu: The model runs on the CPU.
        offline: All files of the model are on this machine.
        largest_body: Bytes of the largest request body; a message may have twice as many.
    """
    # The reasons of what the controller has too are there.
    chosen: list[Variable] = [*map(_without_reason, (*TRANSPORT, CLIENT_HEADERS))]
    if long_answers:
        chosen += map(_without_reason, LONG_ANSWERS)
    if one_machine:
        chosen.append(DRAINING)
    chosen.append(replace(MESSAGES, value=str(max(int(MESSAGES.value), 2 * largest_body))))
    if cpu:
        chosen.append(THREADS)
    if offline:
        chosen += (OFFLINE, _without_reason(NO_REPORTS))
    else:
        chosen.append(NO_REPORTS)
    return tuple(chosen)


def _without_reason(variable: Variable) -> Variable:
    return Variable(variable.name, variable.value)
