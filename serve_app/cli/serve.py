"""Runs `serve run CONFIG` in the foreground: checks it first, shows progress, leaves nothing behind."""

import argparse
import itertools
import os
import resource
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import IO

import httpx
import yaml
from ray._common.utils import get_ray_address_file
from ray._private.utils import read_ray_address
from ray.serve._private.constants import RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
from ray.serve.schema import ServeApplicationSchema, ServeDeploySchema

from serve_app.api.protocol import JSON
from serve_app.auth import bind_check
from serve_app.auth.middleware import KeyStore
from serve_app.cli.log_tail import RequestLines
from serve_app.ingress.health import engine_name
from serve_app.settings.schema import parse
from serve_app.settings.user_config import parse_user_config
from serve_app.system.processes import adopt_orphans, end_descendants

IMPORT_PATH = "serve_app.app:build"
DASHBOARDS = [f"http://127.0.0.1:{port}/api/serve/applications/" for port in range(8265, 8275)]
"""Where Ray's dashboard may be: it takes the first of these ports that is free."""

TOKEN_FILE = Path(os.environ.get("RAY_AUTH_TOKEN_PATH", Path.home() / ".ray" / "auth_token"))
"""Where Ray keeps the token that its dashboard asks for."""

CLEAR_LINE = "\r\033[K"
OPEN_FILES = 10_300
"""What HAProxy asks for as it starts, with the connections that Serve gives it."""

STOP_S = 60.0
"""Seconds that Serve gets to stop, beside those that requests may still take."""


class LaunchError(Exception):
    """Why the service can't start, for its user to read."""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m serve_app.cli.serve",
        description=(
            "Check a Serve config, run `serve run` on it in the foreground, say when it is ready, and stop "
            "everything it started on Ctrl-C or SIGTERM."
        ),
    )
    parser.add_argument(
        "config",
        type=Path,
        help="a Serve config; configs/local.yaml needs no GPU and no download",
    )
    parser.add_argument(
        "--verbose", action="store_true", help="show what Ray, Serve and vLLM log, not only progress"
    )
    parser.add_argument(
        "--log-format",
        choices=["json", "text"],
        help="print a line per request, for programs or for people; over telemetry.request_log in the config",
    )
    options = parser.parse_args()
    try:
        sys.exit(launch(options.config, verbose=options.verbose, log_format=options.log_format))
    except LaunchError as error:
        sys.exit(f"error: {error}")


def launch(path: Path, *, verbose: bool, log_format: str | None = None) -> int:
    """Serve a config until SIGINT or SIGTERM comes, and return the exit code.

    Args:
        path: The config.
        verbose: Show what Ray, Serve and vLLM log.
        log_format: Print a line per request, as "json" or as "text"; None: print none.

    Raises:
        LaunchError: The config is wrong, its port is taken, or the application can't start.
    """
    config = read_config(path)
    host, port = config.http_options.host, config.http_options.port
    if warning := bind_check.warning(host, keys=_asks_for_keys(config)):
        print(warning, file=sys.stderr)
    _check_free(host, port)
    allow_open_files()
    forget_dead_cluster()
    adopt_orphans()
    stop = threading.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: stop.set())
    lines = RequestLines(_print) if log_format else None
    with (
        tempfile.NamedTemporaryFile(prefix="saturate-", suffix=".log", delete=False) as log,
        tempfile.NamedTemporaryFile("w", prefix="saturate-", suffix=".yaml") as changed,
    ):
        if log_format:
            changed.write(with_request_log(path.read_text(), log_format))
            changed.flush()
            path = Path(changed.name)
        progress = Progress(None if verbose else Path(log.name))
        dashboard = Dashboard(port)
        serve = _start(path, None if verbose else log)
        try:
            url = f"http://{'127.0.0.1' if host == '0.0.0.0' else host}:{port}"
            if wait_ready(serve, url, dashboard, progress, stop):
                progress.end(f"Ready: {url}  (Ctrl-C stops it)")
                if lines:
                    lines.start()
            while serve.poll() is None and not stop.wait(0.2):
                pass
            if not stop.is_set():
                raise LaunchError(f"`serve run` ended by itself, with exit code {serve.returncode}")
            progress.end("Stopping; requests in flight are finished first")
            return 0
        except LaunchError:
            progress.end("Stopping")
            progress.show_log()
            raise
        finally:
            _stop(serve, dashboard, STOP_S + answer_s(config))
            if lines:
                lines.stop()


def read_config(path: Path) -> ServeDeploySchema:
    """Read a Serve config and check it, with the args of our applications in it.

    Raises:
        LaunchError: It can't be read, or something in it is wrong.
    """
    try:
        content = yaml.safe_load(path.read_text())
        config = ServeDeploySchema.model_validate(content)
        # Serve itself passes over what it doesn't know, and so over a typo.
        if unknown := sorted(set(content) - set(ServeDeploySchema.model_fields)):
            raise ValueError(
                f"{unknown[0]}: unknown key; allowed: {', '.join(ServeDeploySchema.model_fields)}"
            )
        for app in config.applications:
            if app.import_path != IMPORT_PATH:
                continue
            settings = parse(app.args)
            if settings.access:
                KeyStore(settings.access, environment=_environment(app))
            languages = {engine_name(model.id) for model in settings.models if model.kind == "llm"}
            for deployment in app.deployments:
                if deployment.name in languages and isinstance(deployment.user_config, dict):
                    parse_user_config(deployment.user_config)
    except OSError as error:
        raise LaunchError(f"{path}: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise LaunchError(f"{path}: {error}") from None
    return config


def answer_s(config: ServeDeploySchema) -> float:
    """Return the seconds that an answer may take while its replica stops, as the config has it."""
    usual = RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S
    said = (
        _environment(app).get("RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S", usual) for app in config.applications
    )
    return max(map(float, said), default=float(usual))


def _environment(app: ServeApplicationSchema) -> Mapping[str, str]:
    """Return the environment of an application's replicas."""
    own: dict[str, str] = (app.runtime_env or {}).get("env_vars", {})
    return os.environ | own


def forget_dead_cluster() -> None:
    """Remove Ray's note of a cluster on this machine that is gone.

    A launcher that was killed leaves it, and Ray would try to reach that cluster for minutes, in vain.
    """
    if "RAY_ADDRESS" in os.environ or not (address := read_ray_address()):
        return
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host, int(port)), timeout=5).close()
    except (OSError, ValueError):
        Path(get_ray_address_file(None)).unlink(missing_ok=True)


def allow_open_files() -> None:
    """Make sure that HAProxy will get the open files it starts with; else it ends at once.

    Raises:
        LaunchError: This process may not have as many, nor give itself more.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard == resource.RLIM_INFINITY or hard >= OPEN_FILES:
        return
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, OPEN_FILES))
    except (ValueError, OSError):
        raise LaunchError(
            f"HAProxy needs {OPEN_FILES:,} open files, and {hard:,} are allowed here; raise the limit "
            "(`ulimit -Hn 65536` as root, `LimitNOFILE=` of a systemd unit, `--ulimit nofile=65536` of a "
            "container)"
        ) from None


def _asks_for_keys(config: ServeDeploySchema) -> bool:
    return all(app.import_path == IMPORT_PATH and app.args.get("access") for app in config.applications)


def with_request_log(text: str, log_format: str) -> str:
    """Return a config with another `telemetry.request_log` in our applications."""
    config = yaml.safe_load(text)
    for app in config["applications"]:
        if app["import_path"] == IMPORT_PATH:
            app["args"]["telemetry"] = (app["args"].get("telemetry") or {}) | {"request_log": log_format}
    return yaml.safe_dump(config, sort_keys=False)


def _print(line: str) -> None:
    sys.stdout.write(line)
    sys.stdout.flush()


class Progress:
    """What a person sees while the service starts: a line that counts the seconds, or a line a stage.

    Args:
        log: Where the output of `serve run` goes; None when it is on the terminal already.
    """

    def __init__(self, log: Path | None) -> None:
        self._log = log
        self._live = sys.stderr.isatty() and log is not None
        self._start = time.monotonic()
        self._stage = ""

    def show(self, stage: str) -> None:
        """Show the stage that is under way."""
        if self._live:
            self._write(f"{CLEAR_LINE}[{self._seconds():3.0f} s] {stage} ...")
        elif stage != self._stage:
            self._write(f"[{self._seconds():3.0f} s] {stage}\n")
        self._stage = stage

    def end(self, message: str) -> None:
        """Close the line with a message that stays."""
        self._write(f"{CLEAR_LINE if self._live else ''}[{self._seconds():3.0f} s] {message}\n")

    def show_log(self, lines: int = 40) -> None:
        """Show the end of the log and where the rest is."""
        if self._log:
            text = self._log.read_text(errors="replace").splitlines()[-lines:]
            self._write("\n".join([*text, "", f"the whole log: {self._log}", ""]))

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    @staticmethod
    def _write(text: str) -> None:
        sys.stderr.write(text)
        sys.stderr.flush()


class Dashboard:
    """Ray's dashboard, asked about Serve.

    Args:
        port: That of our Serve. Other Rays on this machine have dashboards too; this tells ours.

    Attributes:
        url: Where it is, once it has been found.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self.url = ""

    def applications(self) -> JSON:
        """Return the state of each application, or nothing while the dashboard can't be reached."""
        for url in [self.url] if self.url else DASHBOARDS:
            details = self._ask(url, "GET")
            if details.get("http_options", {}).get("port") == self._port:
                self.url = url
                applications: JSON = details["applications"]
                return applications
        return {}

    def take_down(self) -> None:
        """Have all applications stopped in order: each finishes what it has."""
        self._ask(self.url, "PUT", {"applications": []})

    @staticmethod
    def _ask(url: str, method: str, body: JSON | None = None) -> JSON:
        token = os.environ.get("RAY_AUTH_TOKEN", "")
        with suppress(OSError):
            token = token or TOKEN_FILE.read_text().strip()
        headers = {"authorization": f"Bearer {token}"} if token else {}
        with suppress(httpx.HTTPError, ValueError):
            answer: JSON = httpx.request(method, url, json=body, headers=headers, timeout=10).json()
            return answer
        return {}


def _check_free(host: str, port: int) -> None:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError as error:
            raise LaunchError(
                f"port {port} on {host} can't be used ({error.strerror}); stop what uses it, or set "
                "http_options.port in the config"
            ) from None


def _start(path: Path, log: IO[bytes] | None) -> "subprocess.Popen[bytes]":
    return subprocess.Popen(
        [str(Path(sys.executable).with_name("serve")), "run", str(path)],
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        # Ray runs its workers, and with them the engine, below every other process unless told otherwise.
        env={"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"} | os.environ,
        # A session of its own: Ctrl-C reaches only this process, which then stops the rest in order.
        start_new_session=True,
    )


def wait_ready(
    serve: "subprocess.Popen[bytes]",
    url: str,
    dashboard: Dashboard,
    progress: Progress,
    stop: threading.Event,
) -> bool:
    """Wait until the service is ready; return whether it is, rather than told to stop before."""
    while (health := _health(url)).get("status") != "ok":
        if serve.poll() is not None:
            raise LaunchError(f"`serve run` failed, with exit code {serve.returncode}")
        apps = dashboard.applications()
        for name, app in apps.items():
            if app["status"] == "DEPLOY_FAILED":
                raise LaunchError(f"the application {name!r} could not start: {_cause(app)}")
        if health:
            states = health["models"].items()
            progress.show("; ".join(f"{name}: {state['state']}" for name, state in states))
        else:
            progress.show("starting Ray Serve" if apps else "starting Ray")
        if stop.wait(0.25):
            return False
    return True


def _cause(app: JSON) -> str:
    """Return why an application failed: what its deployments say, or else what Serve says of it."""
    causes = [
        f"{name}: {_without_trace(deployment['message'])}"
        for name, deployment in app.get("deployments", {}).items()
        if deployment["status"] != "HEALTHY" and deployment["message"]
    ]
    return "\n".join(causes) or _without_trace(app["message"])


def _without_trace(message: str) -> str:
    """Return the last error of a message; its stack trace is in Ray's logs."""
    lines = message.strip().splitlines()
    frames = [number for number, line in enumerate(lines) if line.lstrip().startswith('File "')]
    after = lines[frames[-1] + 1 :] if frames else lines
    return "\n".join(itertools.dropwhile(lambda line: line.startswith("    "), after))


def _health(url: str) -> JSON:
    """Return the service's own report, or nothing while it can't be reached."""
    with suppress(httpx.HTTPError, ValueError):
        report: JSON = httpx.get(f"{url}/health", timeout=2).json()
        return report
    return {}


def _stop(serve: "subprocess.Popen[bytes]", dashboard: Dashboard, patience_s: float) -> None:
    if serve.poll() is None:
        # `serve run` by itself would cut off the answers under way.
        if dashboard.applications():
            dashboard.take_down()
            deadline = time.monotonic() + patience_s
            while dashboard.applications() and time.monotonic() < deadline:
                time.sleep(0.2)
        serve.send_signal(signal.SIGINT)
        with suppress(subprocess.TimeoutExpired):
            serve.wait(STOP_S)
    end_descendants(grace_s=5.0)


if __name__ == "__main__":
    main()
