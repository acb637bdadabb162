"""Wait until a starting service is ready, or explain why it failed."""

import itertools
import re
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from types import MappingProxyType

import httpx

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError, SlowStartError
from serve_app.cli.stop_signals import StopSignals
from serve_app.client import Client, ServiceError
from serve_app.stats import ServiceHealth
from serve_app.system.progress import Progress

HEALTH_S = 5.0
"""Timeout for an answer to `/health` on a busy machine, in seconds."""

MOST_SHOWN = 500
"""Most characters shown of an error in the log."""

SLOW = (
    (
        r"The current node timed out during startup",
        "Ray did not start within {RAY_raylet_start_wait_time_s} s",
    ),
    (r"Timed out waiting for file", "Ray did not start within {RAY_gcs_server_port_wait_time_s} s"),
    (r"[Pp]roxies not available after (\d+)s", "Ray Serve's proxy did not start within {0} s"),
    (r"did not take over the admin socket within (\d+)", "HAProxy did not start within {0} s"),
    (
        r"ActorDiedError[\s\S]{0,400}class_name: (?:HAProxyManager|ProxyActor)",
        "Ray Serve ended its proxy, which did not answer in time",
    ),
)
"""Errors in the log of `serve run` that a busy machine causes, with their messages for the user."""

SLOW_ENDS = r"(?i)timed out|time-?out ?error|deadline.exceeded|failed to connect to gcs|no node info found"
"""Last error lines that a busy machine causes."""


def wait_ready(
    serve: "subprocess.Popen[bytes]",
    url: str,
    dashboard: Dashboard,
    progress: Progress,
    signals: StopSignals,
    log: Callable[[], str] = str,
    limits: Mapping[str, str] = MappingProxyType({}),
) -> bool:
    """Wait until a service is ready.

    Args:
        serve: The process of `serve run`, or its supervisor.
        url: Address of the service.
        dashboard: The service's dashboard.
        progress: Shows the stages.
        signals: Signals that end the wait.
        log: Returns the log of this start.
        limits: Start limits of Ray's processes in seconds, by environment variable.

    Returns:
        True when the service is ready; False if a signal came first.

    Raises:
        SlowStartError: Ray or Ray Serve did not start in time.
        LaunchError: The service failed.
    """
    with Client(url, timeout=httpx.Timeout(HEALTH_S)) as client:
        while (health := _health(client)).status != "ok":
            if serve.poll() is not None:
                raise failure(log(), serve.returncode, limits)
            apps = dashboard.applications()
            for name, app in apps.items():
                if app["status"] == "DEPLOY_FAILED":
                    raise LaunchError(f"the application {name!r} could not start: {_cause(app)}")
            # Before the Ingress is up, HAProxy answers with an error.
            if models := health.models:
                progress.show("; ".join(f"{name}: {health.model(name).state}" for name in models))
            else:
                progress.show("starting Ray Serve" if apps else "starting Ray")
            if signals.wait(0.25):
                return False
    return True


def last_error(log: str) -> str:
    """Return the error at the end of a log on one line, without its stack trace; empty without an error."""
    # Ray colours its lines.
    lines = re.sub(r"\x1b\[[0-9;]*m", "", log).strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    rest: Iterator[str]
    if frames:
        rest = itertools.dropwhile(lambda line: line.startswith("    "), lines[frames[-1] + 1 :])
        # HAProxy's own lines follow: its version first, then the reason after "[ALERT]".
        first, *more = [*rest] or [""]
        alerts = [line.partition(":")[2].strip() for line in more if line.startswith("[ALERT]")]
        rest = iter([": ".join([first.partition("[NOTICE]")[0].rstrip(" :"), *alerts])])
    else:
        rest = iter([line for line in lines if re.search("(?i)error|fail", line)][-1:] or lines[-1:])
    return next(rest, "").strip()[:MOST_SHOWN]


def failure(log: str, code: int, limits: Mapping[str, str]) -> LaunchError:
    """Return the error for a `serve run` that ended before the service was ready.

    Args:
        log: Log of `serve run`.
        code: Exit code of `serve run`.
        limits: Start limits of Ray's processes in seconds, by environment variable.
    """
    for pattern, message in SLOW:
        if found := re.search(pattern, log):
            return SlowStartError(message.format(*found.groups(), **limits))
    error = last_error(log)
    if re.search(SLOW_ENDS, error):
        return SlowStartError(f"Ray did not start in time ({error})")
    return LaunchError(f"`serve run` failed, with exit code {code}{error and f': {error}'}")


def _cause(app: JSON) -> str:
    """Return the reason why an application failed: messages of its deployments, or else its own message."""
    causes = [
        f"{name}: {_without_trace(deployment['message'])}"
        for name, deployment in app.get("deployments", {}).items()
        if deployment["status"] != "HEALTHY" and deployment["message"]
    ]
    return "\n".join(causes) or _without_trace(app["message"])


def _without_trace(message: str) -> str:
    """Return the last error of a message, without the stack trace, which is in Ray's logs."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("    "), after))


def _health(client: Client) -> ServiceHealth:
    """Return the service's health report; empty while the service can't be reached."""
    # Another program may answer on this port.
    with suppress(ServiceError):
        return client.health()
    return ServiceHealth()
