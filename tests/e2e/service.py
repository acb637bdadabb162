"""A live service for the tests: `saturate serve` on a config, in processes of its own."""

import itertools
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import uuid
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import psutil
import yaml

from serve_app.cli.dashboard import Dashboard
from serve_app.system.private_files import token_file
from tests.ports import free_port as free_port
from tests.progress import ANSWER_S, STILL_S, Work, run, wait_until

ROOT = Path(__file__).parents[2]
MARK = "SATURATE_TEST_RUN"

PORTS = itertools.count(20_000 + 100 * random.randrange(20), 100)
"""The first port of each service for its Ingress replicas; other tests may run on this machine."""


def give_ports(config: dict[str, Any]) -> dict[str, str]:
    """Give a Serve config ports of its own, and return the environment that its launcher needs for them."""
    own = {
        # Another service on this machine may have the default ports.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        # Replicas of two services with one port would get each other's requests.
        "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(first := next(PORTS)),
        "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(first + 99),
        # HAProxy turns to this one while no Ingress replica is ready: another service would answer.
        "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(free_port()),
        "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(free_port()),
    }
    # A Ray that another program has started has them from the config.
    for place in (config.setdefault("controller_options", {}), *config["applications"]):
        place.setdefault("runtime_env", {}).setdefault("env_vars", {}).update(own)
    return own


class StartError(RuntimeError):
    """A service did not become ready."""


class Service:
    """A started service.

    Attributes:
        url: Where it listens.
        folder: Where its config is.
        env: The environment in which a program finds the same Ray.
        output: The output of the launcher.
        config: The config that it was started with.
        launcher: The command that serves a config.
    """

    launcher: Sequence[str] = (sys.executable, "-m", "serve_app.cli", "serve")

    def __init__(
        self,
        config: dict[str, Any],
        folder: Path,
        port: int | None = None,
        ray: str | None = None,
        metrics_ms: int = 10_000,
    ) -> None:
        """Start it.

        Args:
            config: A Serve config; its ports are set here.
            folder: Where it is written.
            port: Where to listen; None: any free port.
            ray: The address of the Ray to run on; None: one of its own.
            metrics_ms: How often its processes report metrics; Ray's own pace is 10 s.
        """
        self.config = config
        self.folder = folder
        try:
            self._start(port, ray, metrics_ms)
        except StartError as error:
            warnings.warn(f"The first start of the service in {folder} failed: {error}", stacklevel=2)
            self._start(port, ray, metrics_ms)

    def _start(self, port: int | None, ray: str | None, metrics_ms: int) -> None:
        config, folder = self.config, self.folder
        port = port or free_port()
        config["http_options"]["port"] = port
        own = give_ports(config)
        for app in config["applications"]:
            if "batches" in app["args"]:
                app["args"]["batches"]["folder"] = str(folder / "batches")
        path = folder / "config.yaml"
        path.write_text(yaml.safe_dump(config, sort_keys=False))
        self.url = f"http://127.0.0.1:{port}"
        self._dashboard = Dashboard(port)
        self.env = (
            os.environ
            | own
            | {
                "RAY_USAGE_STATS_ENABLED": "0",
                "RAY_metrics_report_interval_ms": str(metrics_ms),
            }
            | ({} if ray is None else {"RAY_ADDRESS": ray, "RAY_AUTH_MODE": "token"})
        )
        self._mark = uuid.uuid4().hex
        self.process = subprocess.Popen(
            [*self.launcher, str(path)],
            cwd=folder,
            env=self.env | {MARK: self._mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        self.output = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        try:
            wait_until(self._ready.is_set, news=self.news(), tell=lambda: "it is not ready")
            # A process that ends closes its output a moment before it has ended.
            assert "Ready:" in self.output, "it ended"
            assert self.process.poll() is None, "it ended"
        except AssertionError as error:
            with suppress(AssertionError):
                self.stop()
            while self.kill():
                pass
            raise StartError(f"{error}:\n{self.output}") from None

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.output += line
            if "Ready:" in line:
                self._ready.set()
        self._ready.set()

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Stop the service as an operator would, and return the launcher's exit code."""
        if self.process.poll() is None:
            self.process.send_signal(number)
        try:
            wait_until(lambda: self.process.poll() is not None, news=self.news(), tell=lambda: self.output)
        except AssertionError:
            while self.kill():
                pass
            raise
        self._reader.join(STILL_S)
        code: int = self.process.returncode
        return code

    def news(self) -> Callable[[], object]:
        """Return the progress of this service as a function: its output, and the work of its processes."""
        work = Work(self.pids)
        return lambda: (self.output, work())

    def deploy(self, config: dict[str, Any]) -> None:
        """Deploy another config, as `serve deploy` does; return when the change has begun."""
        wait_until(lambda: bool(self._dashboard.applications()), news=self.news())
        token = os.environ.get("RAY_AUTH_TOKEN") or token_file().read_text().strip()
        headers = {"authorization": f"Bearer {token}"}
        httpx.put(self._dashboard.url, json=config, headers=headers, timeout=ANSWER_S).raise_for_status()

    def status(self, name: str = "llm") -> dict[str, Any]:
        """Return the state of an application in Ray Serve."""
        application: dict[str, Any] = self._dashboard.applications()[name]
        return application

    def run(self, command: Sequence[str], text: str = "") -> str:
        """Run a program that may look for this service's Ray, and return its output.

        Args:
            command: The program and its arguments.
            text: Its standard input.
        """
        done = run(command, input=text, env=self.ray_env())
        assert done.returncode == 0, done.stderr
        return done.stdout

    def ray_env(self) -> dict[str, str]:
        """Return the environment of a program that uses this service's Ray."""
        # Another service may run on this machine too: `auto` would find the one that started last.
        lines = " ".join(self.processes())
        (address,) = set(re.findall(r"--gcs-address=([\w.]+:\d+)", lines))
        return self.env | {"RAY_ADDRESS": address, "RAY_AUTH_MODE": "token"}

    def run_python(self, script: str, body: object = None) -> Any:
        """Run a script that reads `body` from its standard input; return the JSON of its last line."""
        return json.loads(self.run([sys.executable, "-c", script], json.dumps(body)).splitlines()[-1])

    def processes(self) -> list[str]:
        """Return the command lines of all processes of this service."""
        return list(self.commands().values())

    def memory(self) -> int:
        """Return the bytes of memory of all processes of this service, shared memory left out."""
        total = 0
        for pid in self.commands():
            with suppress(psutil.NoSuchProcess):
                info = psutil.Process(pid).memory_info()
                total += info.rss - info.shared
        return total

    def log_folder(self) -> Path:
        """Return the folder with the logs of this service's Ray. A later Ray may run on this machine too."""
        lines = self.processes()
        (session,) = {found[0] for line in lines if (found := re.findall(r"/tmp/ray/session_[\w-]+\d", line))}
        return Path(session, "logs")

    def logs(self) -> dict[Path, str]:
        """Return the content of every log of this service's Ray, and of launchers on this machine."""
        files = [*self.log_folder().rglob("*"), *Path(tempfile.gettempdir()).glob("saturate-*.log")]
        return {path: path.read_text(errors="replace") for path in files if path.is_file()}

    def pids(self, word: str = "") -> list[int]:
        """Return the ids of the processes of this service with a word in their command line."""
        return sorted(pid for pid, command in self.commands().items() if word in command)

    def kill(self, word: str = "") -> int:
        """Kill the processes of this service with a word in their command line; return how many."""
        pids = [pid for pid, command in self.commands().items() if word in command]
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return len(pids)

    def commands(self) -> dict[int, str]:
        """Return the command lines of all processes of this service, by their ids."""
        found = {}
        for process in Path("/proc").iterdir():
            try:
                if f"{MARK}={self._mark}".encode() in (process / "environ").read_bytes():
                    command = (process / "cmdline").read_bytes()
                    found[int(process.name)] = command.replace(b"\0", b" ").decode()
            except OSError:
                continue
        return found
