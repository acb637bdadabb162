"""Runs a server as a process, and stops it with all processes that it started."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from serve_app.settings.environment import OFFLINE
from serve_app.system.processes import descendants, end_descendants
from tests.benchmarks.serve import groups
from tests.benchmarks.serve.groups import CpuUsage
from tests.benchmarks.serve.pipes import Pipe
from tests.e2e.service import ROOT, free_port

START_S = 300.0
STOP_S = 60.0


class UnavailableError(Exception):
    """A server can't be measured here; the message has the reason."""


@dataclass(frozen=True, slots=True)
class Server:
    """A running server.

    Attributes:
        name: Name in the tables.
        start_s: Seconds from start to ready.
        log: File of its output.
        port: Port on loopback; 0: none.
        pipe: Pipe to it, if it has no port.
    """

    name: str
    start_s: float
    log: Path
    port: int = 0
    pipe: Pipe | None = None

    def usage(self) -> CpuUsage:
        """Return the CPU time of its processes so far."""
        return groups.usage(self.name)


@contextmanager
def with_log(server: Server, what: str) -> Iterator[None]:
    """Give errors of requests the end of the server's log: samples taken while they fail are meaningless.

    Args:
        server: The server.
        what: What is measured.

    Raises:
        UnavailableError: A request failed.
    """
    try:
        yield
    except (RuntimeError, OSError) as error:
        log = server.log.read_text(errors="replace")[-3000:]
        raise UnavailableError(f"{what} failed: {error}\n{log}") from error


@contextmanager
def over_http(
    name: str,
    command: Sequence[str],
    port: int,
    folder: Path,
    *,
    env: Mapping[str, str],
    ready: str = "/health",
    end: signal.Signals = signal.SIGTERM,
    cwd: Path = ROOT,
) -> Iterator[Server]:
    """Run a server until the block ends; then stop it and every process that it started.

    Args:
        name: Name in the tables.
        command: The program and its arguments.
        port: Port on loopback.
        folder: Folder for its log.
        env: Further environment variables.
        ready: Path that answers 200 once the server is ready.
        end: Signal that ends it.
        cwd: Its working directory, where Python looks for packages first.

    Raises:
        UnavailableError: The server did not become ready.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    started = time.monotonic()
    with log.open("w") as output:
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env=environment() | dict(env),
            cwd=cwd,
            start_new_session=True,
        )
    try:
        while not _ready(port, ready):
            if process.poll() is not None or time.monotonic() - started > START_S:
                raise UnavailableError(f"{name} did not start:\n{log.read_text(errors='replace')[-3000:]}")
            time.sleep(0.1)
        yield Server(name, time.monotonic() - started, log, port)
    finally:
        if process.poll() is None:
            process.send_signal(end)
            deadline = time.monotonic() + STOP_S
            while process.poll() is None and descendants() and time.monotonic() < deadline:
                time.sleep(0.1)
        end_descendants(grace_s=10.0)


def environment() -> dict[str, str]:
    """Return the environment of every server: no download, no reports, ports of their own."""
    env = os.environ | {
        OFFLINE.name: OFFLINE.value,
        "RAY_USAGE_STATS_ENABLED": "0",
        # The default ports may be those of another service on this machine.
        "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
        "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
        # By default Ray's workers have a lower priority than other processes.
        "RAY_worker_niceness": "0",
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _ready(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
