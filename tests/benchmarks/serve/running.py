"""Running a server as a process, with all that it starts, and ending it."""

import os
import signal
import subprocess
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx

from serve_app.system.processes import descendants, end_descendants
from tests.benchmarks.serve import groups
from tests.benchmarks.serve.groups import Usage
from tests.benchmarks.serve.models import config
from tests.benchmarks.serve.pipes import Pipe
from tests.e2e.service import free_port

START_S = 300.0
STOP_S = 60.0


class UnavailableError(Exception):
    """A server that can't be measured here; the message says why, for a person to read."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        name: What it is called in the tables.
        start_s: Seconds from its start until it was ready.
        log: Where its output goes.
        port: Where it listens on loopback; 0: it doesn't.
        pipe: Where it is asked, if not over HTTP.
    """

    name: str
    start_s: float
    log: Path
    port: int = 0
    pipe: Pipe | None = None

    def usage(self) -> Usage:
        """Return what its processes have used so far."""
        return groups.usage(self.name)


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
) -> Iterator[Server]:
    """Run a server until the block ends, and everything that it started with it.

    Args:
        name: What it is called in the tables.
        command: The program and its arguments.
        port: Where it will listen on loopback.
        folder: For its log.
        env: What else is in its environment.
        ready: The path that answers 200 once it can serve.
        end: The signal that ends it.

    Raises:
        UnavailableError: It did not become ready.
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
    """Return the environment of every server: what configs/local.yaml sets for the engine, and more."""
    (app,) = config()["applications"]
    engine = {k: v for k, v in app["runtime_env"]["env_vars"].items() if k.startswith(("VLLM_", "HF_"))}
    env = (
        os.environ
        | engine
        | {
            "RAY_USAGE_STATS_ENABLED": "0",
            # Beside a service that somebody runs on this machine with the default ports.
            "RAY_SERVE_HAPROXY_STATS_PORT": str(free_port()),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(free_port()),
            # Ray would run its workers below every other process.
            "RAY_worker_niceness": "0",
        }
    )
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return env


def _ready(port: int, path: str) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}{path}", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
