"""Wait for a service that starts: until it is ready, or until it fails, and why."""

import itertools
import subprocess
from contextlib import suppress

import httpx

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.cli.errors import LaunchError
from serve_app.cli.progress import Progress
from serve_app.cli.stop_signals import StopSignals


def wait_ready(
    serve: "subprocess.Popen[bytes]",
    url: str,
    dashboard: Dashboard,
    progress: Progress,
    signals: StopSignals,
) -> bool:
    """Wait until a service is ready.

    Args:
        serve: The process of `serve run`, or the one that supervises it.
        url: Address of the service.
        dashboard: Its dashboard.
        progress: Shows the stages.
        signals: End the wait.

    Returns:
        Whether the service is ready; False if it was told to stop before.

    Raises:
        LaunchError: The service failed.
    """
    while (health := _health(url)).get("status") != "ok":
        if serve.poll() is not None:
            raise LaunchError(f"`serve run` failed, with exit code {serve.returncode}")
        apps = dashboard.applications()
        for name, app in apps.items():
            if app["status"] == "DEPLOY_FAILED":
                raise LaunchError(f"the application {name!r} could not start: {_cause(app)}")
        # Before the Ingress answers, HAProxy does, with an error.
        if models := health.get("models"):
            states = models.items()
            progress.show("; ".join(f"{name}: {state['state']}" for name, state in states))
        else:
            progress.show("starting Ray Serve" if apps else "starting Ray")
        if signals.wait(0.25):
            return False
    return True


def _cause(app: JSON) -> str:
    """Return the reason why an application failed: that of its deployments, or else Serve's own."""
    causes = [
        f"{name}: {_without_trace(deployment['message'])}"
        for name, deployment in app.get("deployments", {}).items()
        if deployment["status"] != "HEALTHY" and deployment["message"]
    ]
    return "\n".join(causes) or _without_trace(app["message"])


def _without_trace(message: str) -> str:
    """Return the last error of a message; Ray's logs have its stack trace."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("    "), after))


def _health(url: str) -> JSON:
    """Return the service's report of its health; empty while it can't be reached."""
    with suppress(httpx.HTTPError, ValueError):
        report: JSON = httpx.get(f"{url}/health", timeout=2).json()
        return report
    return {}
