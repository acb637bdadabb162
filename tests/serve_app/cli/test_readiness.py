"""The wait for a service that starts."""

import subprocess
from collections.abc import Callable
from typing import Any

import pytest

from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError
from serve_app.cli.readiness import wait_ready
from serve_app.cli.stop_signals import StopSignals
from serve_app.system.progress import Progress
from tests.ports import free_port


def test_a_deployment_that_fails_is_reported_by_its_error_without_the_stack_trace(
    dashboard: Callable[[dict[str, Any]], list[str]],
) -> None:
    port = free_port()
    trace = (
        'Traceback:\n  File "x.py", line 3, in __init__\n    load()\n    ^^^^^^\n'
        "OSError: no such model\n  at all"
    )
    engine = {"status": "DEPLOY_FAILED", "message": trace}
    app = {"status": "DEPLOY_FAILED", "message": "failed", "deployments": {"Engine:demo": engine}}
    dashboard({"http_options": {"port": port}, "applications": {"llm": app}})
    with subprocess.Popen(["sleep", "30"]) as serve:
        progress, signals = Progress(), StopSignals()
        with pytest.raises(LaunchError) as caught:
            wait_ready(serve, f"http://127.0.0.1:{port}", Dashboard(port), progress, signals)
        serve.kill()
    assert str(caught.value) == (
        "the application 'llm' could not start: Engine:demo: OSError: no such model\n  at all"
    )
