"""The wait for a service that starts, and the reason why a start failed."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError, SlowStartError
from serve_app.cli.readiness import failure, last_error, wait_ready
from serve_app.cli.stop_signals import StopSignals
from serve_app.system.progress import Progress
from tests.ports import free_port

LOG = """\
serve's own log
2026-11-27 10:00:00,000 \x1b[31mERROR\x1b[0m scripts.py:600 -- Received unexpected error, see console logs.
Traceback (most recent call last):
  File "scripts.py", line 580, in run
    serve.start()
    ^^^^^^^^^^^^^
{error}
"""
"""The log of a `serve run` that fails."""

LIMITS = {"RAY_raylet_start_wait_time_s": "120", "RAY_gcs_server_port_wait_time_s": "119"}

SLOW = {
    "Exception: The current node timed out during startup. This could happen because some of the raylet": (
        "Ray did not start within 120 s"
    ),
    "RuntimeError: Timed out waiting for file /tmp/ray/gcs_server_port": "Ray did not start within 119 s",
    "TimeoutError: HTTP proxies not available after 60s.": "Ray Serve's proxy did not start within 60 s",
    "RuntimeError: HAProxy (pid=5) did not take over the admin socket within 121 seconds.": (
        "HAProxy did not start within 121 s"
    ),
    **{
        "ray.exceptions.ActorDiedError: The actor died unexpectedly before finishing this task.\n"
        f"\tclass_name: {actor}\n\tactor_id: 1f": "Ray Serve ended its proxy, which did not answer in time"
        for actor in ("HAProxyManager", "ProxyActor")
    },
    **{
        error: f"Ray did not start in time ({error})"
        for error in (
            "ray.exceptions.RpcError: Deadline Exceeded",
            "RuntimeError: Failed to connect to GCS",
            "Exception: No node info found",
            "asyncio.TimeoutError: 5",
        )
    },
}


@pytest.mark.parametrize("error", SLOW)
def test_a_start_that_a_busy_machine_delays_may_be_tried_again(error: str) -> None:
    found = failure(LOG.format(error=error), 3, LIMITS)
    assert (type(found), found.message) == (SlowStartError, SLOW[error])


@pytest.mark.parametrize(
    ("log", "reason"),
    [
        (LOG.format(error="ValueError: no such thing\nby the way"), ": ValueError: no such thing"),
        (LOG.format(error=f"ValueError: {'x' * 1_000}"), f": ValueError: {'x' * 488}"),
        # The version of HAProxy is no reason.
        (
            LOG.format(
                error="RuntimeError: HAProxy crashed during startup: [NOTICE]   (5) : haproxy version is "
                "2.8.25\n"
                "[NOTICE]   (5) : path to executable is haproxy\n"
                "[ALERT]    (5) : Starting frontend stats: cannot bind socket [0.0.0.0:8404]"
            ),
            ": RuntimeError: HAProxy crashed during startup: Starting frontend stats: cannot bind socket "
            "[0.0.0.0:8404]",
        ),
        ("one\nit failed: here\nlast\n", ": it failed: here"),
        ("one\n\x1b[36mlast\x1b[0m\n", ": last"),
        ("", ""),
    ],
)
def test_another_failure_has_the_last_error_of_the_log_on_one_line(log: str, reason: str) -> None:
    found = failure(log, 3, LIMITS)
    assert (type(found), found.message) == (
        LaunchError,
        f"`serve run` failed, with exit code 3{reason}",
    )
    assert f": {last_error(log)}".removesuffix(": ") == reason


@pytest.mark.parametrize(
    ("app", "reason"),
    [
        (
            {
                "message": "failed",
                "deployments": {
                    "Ingress": {"status": "HEALTHY", "message": "fine"},
                    "Engine:demo": {
                        "status": "DEPLOY_FAILED",
                        "message": 'Traceback:\n  File "x.py", line 3, in __init__\n    load()\n    ^^^^^^\n'
                        "OSError: no such model\n  at all",
                    },
                },
            },
            "Engine:demo: OSError: no such model\n  at all",
        ),
        ({"message": "failed"}, "failed"),
    ],
)
def test_a_deployment_that_fails_is_reported_by_its_error_without_the_stack(
    dashboard: Callable[[dict[str, Any]], list[str]], app: dict[str, Any], reason: str
) -> None:
    port = free_port()
    status = {"status": "DEPLOY_FAILED"}
    dashboard({"http_options": {"port": port}, "applications": {"llm": app | status}})
    with subprocess.Popen(["sleep", "30"]) as serve:
        with pytest.raises(LaunchError) as caught:
            wait_ready(serve, f"http://127.0.0.1:{port}", Dashboard(port), Progress(), StopSignals())
        serve.kill()
    assert str(caught.value) == f"the application 'llm' could not start: {reason}"
