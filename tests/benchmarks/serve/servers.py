"""The servers, each with the same model and the same engine arguments."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import httpx
import psutil
import yaml

from tests.e2e.service import ROOT, free_port

START_S = 240.0


@dataclass(frozen=True, slots=True)
class Server:
    """A server that runs.

    Attributes:
        port: Where it listens on loopback.
        pid: Of the process that all its others come from.
        start_s: Seconds from its start until it was ready.
    """

    port: int
    pid: int
    start_s: float

    def usage(self) -> tuple[float, float]:
        """Return the CPU seconds that its processes have used, and their memory in MiB (proportional)."""
        cpu = memory = 0.0
        top = psutil.Process(self.pid)
        for process in [top, *top.children(recursive=True)]:
            try:
                times = process.cpu_times()
                cpu += times.user + times.system
                memory += process.memory_full_info().pss / 2**20
            except psutil.NoSuchProcess:
                continue
        return cpu, memory


def engine() -> dict[str, Any]:
    """Return the engine arguments of configs/local.yaml: those of every server here."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    arguments: dict[str, Any] = config["applications"][0]["args"]["models"][0]["engine"]
    return arguments


@contextmanager
def saturate(folder: Path) -> Iterator[Server]:
    """Run this project's configs/local.yaml."""
    config = yaml.safe_load((ROOT / "configs/local.yaml").read_text())
    config["http_options"]["port"] = port = free_port()
    path = folder / "saturate.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    with _run([sys.executable, "-m", "serve_app.launch", str(path)], port, folder / "saturate.log") as server:
        yield server


@contextmanager
def vllm_serve(folder: Path) -> Iterator[Server]:
    """Run vLLM's own API server."""
    port = free_port()
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", str(ROOT / "serve_app/demo/model"), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    for name, value in engine().items():
        flag = "--" + name.replace("_", "-")
        command += [flag] if value is True else [flag, str(value)]
    with _run(command, port, folder / "vllm.log") as server:
        yield server


SERVERS: Mapping[str, Callable[[Path], Any]] = {"saturate": saturate, "vllm serve": vllm_serve}


@contextmanager
def _run(command: list[str], port: int, log: Path) -> Iterator[Server]:
    started = time.monotonic()
    with log.open("w") as output:
        process = _start(command, output)
        try:
            while not _ready(port):
                if process.poll() is not None or time.monotonic() - started > START_S:
                    raise RuntimeError(f"{command[2]} did not start:\n{log.read_text()[-3000:]}")
                time.sleep(0.2)
            yield Server(port, process.pid, time.monotonic() - started)
        finally:
            process.send_signal(signal.SIGTERM)
            process.wait(timeout=120)


def _start(command: list[str], output: IO[str]) -> "subprocess.Popen[str]":
    env = os.environ | {
        # What Ray gives to an actor of one core, and what configs/local.yaml sets.
        "OMP_NUM_THREADS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
    }
    env.pop("PYTHONDONTWRITEBYTECODE", None)
    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=output,
        env=env,
        start_new_session=True,
        text=True,
    )


def _ready(port: int) -> bool:
    try:
        return httpx.get(f"http://127.0.0.1:{port}/health", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
