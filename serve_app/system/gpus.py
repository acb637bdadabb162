"""The GPUs of this machine, as NVIDIA's management library tells them."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable that names the GPUs which CUDA shows."""


class DriverError(Exception):
    """NVIDIA's driver is there, and fails; the message is its own."""


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        number: Its number.
        uuid: Its id.
        name: As its maker calls it.
        total: Bytes of its memory; None: it doesn't tell.
        reserved: Bytes that the driver has.
        used: Bytes that programs have.
        free: Bytes that are free; None: it doesn't tell.
        capability: CUDA's compute capability, such as 8.9; None: not known.
        is_divided: It is divided into slices by MIG.
    """

    number: int
    uuid: str
    name: str
    total: int | None = None
    reserved: int = 0
    used: int = 0
    free: int | None = None
    capability: float | None = None
    is_divided: bool = False


class GPUProcess(NamedTuple):
    """A process that holds memory of a GPU.

    Attributes:
        pid: Its id.
        name: Its program.
        memory: Bytes; None: not known.
    """

    pid: int
    name: str
    memory: int | None


class Devices(NamedTuple):
    """What the driver tells.

    Attributes:
        driver: Its version, such as "570.86.15".
        cuda: The newest CUDA that it runs, such as (12, 8).
        gpus: The GPUs.
        holders: The processes that hold memory of them.
    """

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[GPU, ...] = ()
    holders: tuple[GPUProcess, ...] = ()


def read_devices(library: Any = None) -> Devices | None:
    """Return what NVIDIA's driver tells; None: there is no driver.

    Args:
        library: NVIDIA's library; by default that of the package `nvidia-ml-py`.

    Raises:
        DriverError: The driver fails.
    """
    nvml = library or import_module("pynvml")
    try:
        nvml.nvmlInit()
    except (nvml.NVMLError_LibraryNotFound, nvml.NVMLError_DriverNotLoaded):
        return None
    except nvml.NVMLError as error:
        raise DriverError(str(error)) from None
    try:
        newest = nvml.nvmlSystemGetCudaDriverVersion_v2()
        handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
        return Devices(
            nvml.nvmlSystemGetDriverVersion(),
            (newest // 1000, newest % 1000 // 10),
            tuple(_gpu(nvml, number, handle) for number, handle in enumerate(handles)),
            tuple(holder for handle in handles for holder in _holders(nvml, handle)),
        )
    except nvml.NVMLError as error:
        raise DriverError(str(error)) from None
    finally:
        with suppress(nvml.NVMLError):
            nvml.nvmlShutdown()


def visible_gpus(gpus: Sequence[GPU], names: str | None) -> list[GPU]:
    """Return the GPUs that CUDA shows to a program: up to the first name that is not one.

    Args:
        gpus: All GPUs.
        names: `CUDA_VISIBLE_DEVICES`: indexes, ids or their beginnings; None: all are shown.
    """
    if names is None:
        return list(gpus)
    shown: list[GPU] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        by_id = name.startswith("GPU-")
        match = [gpu for gpu in gpus if (gpu.uuid.startswith(name) if by_id else str(gpu.number) == name)]
        if len(match) != 1:
            break
        shown += match
    return shown


def _gpu(nvml: Any, number: int, handle: Any) -> GPU:
    def told(ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return an answer; None: this GPU doesn't tell."""
        with suppress(nvml.NVMLError):
            return ask(handle, *arguments)
        return None

    memory = told(nvml.nvmlDeviceGetMemoryInfo, nvml.nvmlMemory_v2)
    capability = told(nvml.nvmlDeviceGetCudaComputeCapability)
    divided = told(nvml.nvmlDeviceGetMigMode)
    return GPU(
        number,
        nvml.nvmlDeviceGetUUID(handle),
        nvml.nvmlDeviceGetName(handle),
        memory and memory.total,
        memory.reserved if memory else 0,
        memory.used if memory else 0,
        memory and memory.free,
        float(f"{capability[0]}.{capability[1]}") if capability else None,
        bool(divided and divided[0]),
    )


def _holders(nvml: Any, handle: Any) -> list[GPUProcess]:
    found = []
    with suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            name = "a process"
            with suppress(nvml.NVMLError):
                name = nvml.nvmlSystemGetProcessName(process.pid)
            found.append(GPUProcess(process.pid, name, process.usedGpuMemory))
    return found
