"""The devices of this machine: its GPUs, or the CPU if there are none."""

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from serve_app.models.errors import ModelError
from serve_app.system.gpus import GPU, SLICE, VISIBLE, DriverError, read_devices, visible_gpus
from serve_app.system.limits import available_cores, available_memory


@dataclass(frozen=True)
class UsableGPU:
    """A GPU that a model can use.

    Attributes:
        name: Product name.
        memory: Bytes that programs can use.
        used: Bytes that other programs use.
        capability: CUDA compute capability, such as 8.9; None: unknown.
        is_slice: Whether it is a slice of a GPU (MIG).
    """

    name: str
    memory: int
    used: int = 0
    capability: float | None = None
    is_slice: bool = False


@dataclass(frozen=True)
class Machine:
    """The devices and the memory of a machine that a service can use.

    Attributes:
        gpus: The GPUs; empty: the model runs on the CPU.
        cores: Cores of the CPU.
        memory: Available bytes of the host's memory.
        cluster: Resources of the nodes of the Ray cluster by name, those of this machine first; empty: there
            is no cluster.
    """

    gpus: tuple[UsableGPU, ...]
    cores: int
    memory: int
    cluster: tuple[Mapping[str, float], ...] = ()

    @property
    def nodes(self) -> int:
        """Nodes with the GPUs of this machine: the kind, and at least the number."""
        own: Mapping[str, float] = self.cluster[0] if self.cluster else {}
        kinds = {name for name in own if name.startswith("accelerator_type:")}
        count = own.get("GPU", 0)
        found = [node for node in self.cluster if node.get("GPU", 0) >= count and kinds <= node.keys()]
        return len(found) if count else 1


def find_machine(environment: Mapping[str, str] | None = None) -> Machine:
    """Return this machine, with the GPUs that `CUDA_VISIBLE_DEVICES` selects.

    Raises:
        ModelError: The memory of a GPU is unknown.
    """
    environment = os.environ if environment is None else environment
    try:
        devices = read_devices()
    except DriverError:
        # `saturate doctor` reports this error.
        devices = None
    gpus = find_gpus(devices.gpus if devices else (), environment.get(VISIBLE))
    elsewhere = environment.get("RAY_ADDRESS", "local") not in {"", "local"}
    cluster = _cluster() if gpus and elsewhere else ()
    # The same count as Ray's.
    return Machine(gpus, max(1, int(available_cores())), available_memory().free, cluster)


def _cluster() -> tuple[Mapping[str, float], ...]:
    """Return the resources of the nodes of the Ray cluster at `RAY_ADDRESS`, those of this machine first.

    Raises:
        ModelError: The cluster can't be reached.
    """
    # The import takes a second, and most services start a Ray of their own.
    import ray

    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, RuntimeError) as error:
        raise ModelError(f"RAY_ADDRESS: the Ray cluster can't be reached: {error}") from None
    try:
        own = ray.get_runtime_context().get_node_id()
        alive = [node for node in ray.nodes() if node["Alive"]]  # type: ignore[no-untyped-call]
    finally:
        ray.shutdown()
    return tuple(node["Resources"] for node in sorted(alive, key=lambda node: node["NodeID"] != own))


def find_gpus(gpus: Sequence[GPU], visible: str | None) -> tuple[UsableGPU, ...]:
    """Return the GPUs that a model can use.

    Args:
        gpus: All GPUs of this machine.
        visible: `CUDA_VISIBLE_DEVICES`: indexes or UUIDs; None: all GPUs.

    Raises:
        ModelError: The memory of a GPU is unknown.
    """
    # Ray counts whole GPUs: it hands out no more slices than those.
    return tuple(_usable(gpu) for gpu in visible_gpus(gpus, visible)[: len(gpus)])


def _usable(gpu: GPU) -> UsableGPU:
    """Return a GPU with the memory that a model can use."""
    if gpu.slices is not None:
        there = ", ".join(f"{one.uuid} ({(one.total or 0) / 1e9:.1f} GB)" for one in gpu.slices) or "none"
        raise ModelError(
            f"GPU {gpu.number} ({gpu.name}) is divided by MIG; set {VISIBLE} to one of its slices: {there}"
        )
    if gpu.total is None:
        raise ModelError(
            f"GPU {gpu.number} ({gpu.name}) doesn't report its memory; write a config with "
            "engine.max_model_len and engine.gpu_memory_utilization (the page Configs)"
        )
    is_slice = gpu.uuid.startswith(SLICE)
    return UsableGPU(gpu.name, gpu.total - gpu.reserved, gpu.used, gpu.capability, is_slice)
