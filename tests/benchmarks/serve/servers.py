"""Servers, all with the same model and the same engine arguments."""

import importlib.util
import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import yaml

from serve_app.settings.telemetry import SILENT as SILENT_TELEMETRY
from serve_app.system.processes import end_descendants
from tests.benchmarks.serve import ray_llm
from tests.benchmarks.serve.models import Model, config
from tests.benchmarks.serve.pipes import Pipe
from tests.benchmarks.serve.running import Server, UnavailableError, environment, over_http
from tests.e2e.service import ROOT, free_port, give_ports

MANY = 1 << 40
"""A limit that no load reaches."""

Start = Callable[[Model, Path], AbstractContextManager[Server]]
"""Starts a server with a model and a folder for its files."""


@contextmanager
def saturate(
    model: Model,
    folder: Path,
    batcher: Mapping[str, Any] | None = None,
    telemetry: Mapping[str, Any] | None = None,
    batches: Path | None = None,
    usage: Mapping[str, Any] | None = None,
    replicas: Mapping[str, int] | None = None,
    tree: Path = ROOT,
) -> Iterator[Server]:
    """Run this project's configs/local.yaml with another model and further settings.

    Args:
        model: The model.
        folder: Folder for the config and the log.
        batcher: Settings of the batcher.
        telemetry: Settings of the telemetry.
        batches: Folder of the batch API; None: there is none.
        usage: Accounting; None: there is none.
        replicas: Number of replicas by deployment, which then reserve no cores in Ray.
        tree: Checkout of this project; another one than this needs a `.venv` of its own.
    """
    content = config(tree)
    content["http_options"]["port"] = port = free_port()
    (served,) = content["applications"][0]["args"]["models"]
    del content["applications"][0]["args"]["batches"]
    if batches is not None:
        content["applications"][0]["args"]["batches"] = {"folder": str(batches)}
    served |= model.settings
    served["batcher"] |= batcher or {}
    if telemetry is not None:
        content["applications"][0]["args"]["telemetry"] = dict(telemetry)
    if usage is not None:
        content["applications"][0]["args"]["usage"] = dict(usage)
    for deployment in content["applications"][0]["deployments"]:
        if model.gpus and deployment["name"].startswith("Engine:"):
            deployment["ray_actor_options"]["num_gpus"] = model.gpus
        if replicas is not None:
            deployment["num_replicas"] = replicas[deployment["name"]]
            deployment["ray_actor_options"]["num_cpus"] = 0
    # The server before it may still hold its ports.
    ports = give_ports(content)
    path = folder / "saturate.yaml"
    path.write_text(yaml.safe_dump(content, sort_keys=False))
    python = sys.executable if tree == ROOT else str(tree / ".venv/bin/python")
    command = [python, "-m", "serve_app.cli", "serve", "--verbose", str(path)]
    with over_http("saturate", command, port, folder, env=model.env | ports, cwd=tree) as server:
        yield server


def silent(model: Model, folder: Path) -> AbstractContextManager[Server]:
    """Run the same without telemetry."""
    return saturate(model, folder, telemetry=SILENT_TELEMETRY.model_dump())


def accounted(model: Model, folder: Path) -> AbstractContextManager[Server]:
    """Run the same with a quota that is never reached, and with a ledger."""
    quota = {"tokens_per_minute": MANY, "requests_per_minute": MANY, "max_concurrency": MANY}
    usage = {
        "quotas": {"folder": str(folder / "quotas"), "tenants": {"default": quota}},
        "ledger": {"folder": str(folder / "ledger")},
    }
    return saturate(model, folder, usage=usage)


def flags(engine: Mapping[str, Any]) -> list[str]:
    """Return options of `vllm serve` as words of its command line."""
    words: list[str] = []
    for name, value in engine.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", json.dumps(value) if isinstance(value, dict) else str(value)]
    return words


def vllm_command(model: Model, port: int) -> list[str]:
    """Return the command that runs vLLM's own API server with a model on a port."""
    command = [sys.executable, "-m", "vllm.entrypoints.launchers.api_server.entry"]
    command += ["--model", str(model.folder), "--served-model-name", "demo"]
    command += ["--host", "127.0.0.1", "--port", str(port), "--disable-uvicorn-access-log"]
    command += flags({**model.engine, **model.lora})
    if model.adapters:
        command += ["--lora-modules", *(f"{name}={path}" for name, path in model.adapters.items())]
    return command


@contextmanager
def vllm_serve(model: Model, folder: Path) -> Iterator[Server]:
    """Run vLLM's own API server."""
    port = free_port()
    with over_http("vllm serve", vllm_command(model, port), port, folder, env=model.env) as server:
        yield server


@contextmanager
def seeds(model: Model, folder: Path) -> Iterator[Server]:
    """Run the seeds' design: one batcher of fixed batches in front of `LLM.generate`."""
    if importlib.util.find_spec("flyte") is None:
        raise UnavailableError("the package flyte is not installed (`make bench NAME=serve` installs it)")
    port = free_port()
    command = [sys.executable, "-m", "tests.benchmarks.serve.static", str(port), json.dumps(model.offline)]
    with over_http("seeds' design", command, port, folder, env=model.env) as server:
        yield server


@contextmanager
def offline(model: Model, folder: Path) -> Iterator[Server]:
    """Run `vllm.LLM` without a service: the engine's own throughput."""
    log = folder / "offline.log"
    command = [sys.executable, "-m", "tests.benchmarks.serve.offline", json.dumps(model.offline)]
    started = time.monotonic()
    try:
        with Pipe(command, environment() | model.env, log) as pipe:
            pipe.read()
            yield Server("LLM.generate", time.monotonic() - started, log, pipe=pipe)
    finally:
        end_descendants(grace_s=10.0)


OURS, VLLM, RAY_DIRECT, RAY = "saturate", "vllm serve", "ray.serve.llm direct", "ray.serve.llm"
SEEDS, OFFLINE = "seeds' design", "LLM.generate"
SILENT, ACCOUNTED = "saturate without metrics", "saturate with quotas"

SERVERS: Mapping[str, tuple[Start, str]] = {
    OURS: (saturate, "this project, configs/local.yaml"),
    VLLM: (vllm_serve, "vLLM's own API server"),
    RAY_DIRECT: (ray_llm.direct, "ray.serve.llm with direct streaming, in .bench/ray-llm"),
    RAY: (ray_llm.default, "ray.serve.llm with default settings"),
    SEEDS: (seeds, "FastAPI, one TokenBatcher of the package flyte, LLM.generate in a thread"),
    OFFLINE: (offline, "vllm.LLM without a service: the engine's own throughput"),
    SILENT: (silent, "saturate without metrics and request log, for their cost"),
    ACCOUNTED: (accounted, "saturate with quotas and the usage ledger, for their cost"),
}
"""Start function and short description of each, by name."""

VARIANTS = (SILENT, ACCOUNTED)
"""This project with other settings, which are measured for their cost only where they are named."""

DEFAULT = [name for name in SERVERS if name not in VARIANTS]
"""Servers that are measured if none is named."""

ON_DEVICE = [OURS, VLLM, SEEDS, OFFLINE, SILENT]
"""Servers that run on a simulated device. ray.serve.llm has another vLLM, with another executor."""

DEFAULT_ON_DEVICE = [OURS, VLLM, SEEDS]
"""Those that are measured there if none is named."""
