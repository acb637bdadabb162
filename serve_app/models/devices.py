"""The devices of this machine: GPUs by `nvidia-smi`, or else the CPU."""

import os
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ray._private.utils import get_num_cpus

from serve_app.models.errors import ModelError
from serve_app.models.gpus import GPU, QUERY, VISIBLE, read_gpus, visible_gpus

NVIDIA_SMI_S = 20.0
"""Seconds for `nvidia-smi`, which takes some where the driver's daemon isn't running."""

Ask = Callable[[Sequence[str]], str]
"""Runs a program and returns its output; raises an OSError or a SubprocessError."""


@dataclass(frozen=True)
class Gpu:
    """A GPU.

    Attributes:
        name: As its maker calls it.
        memory: Bytes that programs can have of it.
        used: Bytes that other programs have.
        capability: CUDA's compute capability, such as 8.9; None: not known.
    """

    name: str
    memory: int
    used: int = 0
    capability: float | None = None


@dataclass(frozen=True)
class Machine:
    """The devices and the memory of a machine that a service can use.

    Attributes:
        gpus: Its GPUs; empty: the model runs on the CPU.
        cores: Cores of the CPU.
        memory: Bytes of the host's memory that are available.
    """

    gpus: tuple[Gpu, ...]
    cores: int
    memory: int


def find_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Return this machine, with the GPUs that `CUDA_VISIBLE_DEVICES` shows.

    Raises:
        ModelError: GPUs are there, and their memory can't be told.
    """
    environment = os.environ if environment is None else environment
    return Machine(
        find_gpus(_ask, environment.get(VISIBLE)),
        # As many as Ray will count.
        max(1, int(get_num_cpus(override_docker_cpu_warning=True))),
        available_memory(Path("/")),
    )


def find_gpus(ask: Ask, visible: str | None) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine; none if there is no driver or no device.

    Args:
        ask: Runs `nvidia-smi`.
        visible: `CUDA_VISIBLE_DEVICES`: indexes or ids; None: all.

    Raises:
        ModelError: A GPU is there, and its memory can't be told.
    """
    try:
        text = ask(QUERY)
    except subprocess.TimeoutExpired:
        raise ModelError(
            f"nvidia-smi gave no answer within {NVIDIA_SMI_S:g} s; see that it works, or set "
            f"{VISIBLE}= (empty) to use the CPU"
        ) from None
    except (OSError, subprocess.SubprocessError):
        return ()
    for name in (visible or "").split(","):
        if name.strip().startswith("MIG-"):
            raise ModelError(
                f"{VISIBLE} names {name.strip()}, a slice of a GPU, whose memory can't be told here; write a "
                "config with engine.max_model_len and engine.gpu_memory_utilization (configs/README.md)"
            )
    return tuple(_usable(gpu) for gpu in visible_gpus(read_gpus(text), visible))


def _usable(gpu: GPU) -> Gpu:
    """Return what a model can have of a GPU."""
    if gpu.is_divided:
        raise ModelError(
            f"GPU {gpu.number} ({gpu.name}) is divided by MIG, and the memory of its slices can't be told "
            "here; write a config with engine.max_model_len and engine.gpu_memory_utilization "
            "(configs/README.md)"
        )
    if gpu.total is None:
        raise ModelError(
            f"GPU {gpu.number} ({gpu.name}) doesn't tell its memory; write a config with "
            "engine.max_model_len and engine.gpu_memory_utilization (configs/README.md)"
        )
    return Gpu(gpu.name, gpu.total - gpu.reserved, gpu.used, gpu.capability)


def available_memory(root: Path) -> int:
    """Return the bytes of memory that processes can still have, within the limit of this container.

    Args:
        root: The root of the file system.
    """
    values = {}
    for line in (root / "proc/meminfo").read_text().splitlines():
        name, _, value = line.partition(":")
        values[name] = value.split()
    available = int(values["MemAvailable"][0]) * 1024
    group = root / "sys/fs/cgroup"
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
    except (OSError, ValueError):
        # No limit: the file is missing, or says "max".
        return available
    # Cached files give way.
    return max(0, min(available, limit - used + int(stat["inactive_file"])))


def _ask(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=NVIDIA_SMI_S, check=True).stdout
