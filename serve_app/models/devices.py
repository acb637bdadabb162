"""The devices of this machine: GPUs, or else the CPU."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.models.errors import ModelError
from serve_app.system.gpus import GPU, VISIBLE, DriverError, read_devices, visible_gpus
from serve_app.system.limits import available_cores, available_memory


@dataclass(frozen=True)
class UsableGPU:
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

    gpus: tuple[UsableGPU, ...]
    cores: int
    memory: int


def find_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Return this machine, with the GPUs that `CUDA_VISIBLE_DEVICES` shows.

    Raises:
        ModelError: GPUs are there, and their memory can't be told.
    """
    environment = os.environ if environment is None else environment
    try:
        devices = read_devices()
    except DriverError:
        # `saturate doctor` tells it.
        devices = None
    gpus = find_gpus(devices.gpus if devices else (), environment.get(VISIBLE))
    # As many cores as Ray will count.
    return Machine(gpus, max(1, int(available_cores())), available_memory().free)


def find_gpus(gpus: Sequence[GPU], visible: str | None) -> tuple[UsableGPU, ...]:
    """Return what a model can have of the GPUs of this machine.

    Args:
        gpus: All of them.
        visible: `CUDA_VISIBLE_DEVICES`: indexes or ids; None: all.

    Raises:
        ModelError: A GPU is there, and its memory can't be told.
    """
    for name in (visible or "").split(","):
        if gpus and name.strip().startswith("MIG-"):
            raise ModelError(
                f"{VISIBLE} names {name.strip()}, a slice of a GPU, whose memory can't be told here; write a "
                "config with engine.max_model_len and engine.gpu_memory_utilization (configs/README.md)"
            )
    return tuple(_usable(gpu) for gpu in visible_gpus(gpus, visible))


def _usable(gpu: GPU) -> UsableGPU:
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
    return UsableGPU(gpu.name, gpu.total - gpu.reserved, gpu.used, gpu.capability)
