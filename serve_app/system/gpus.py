"""The GPUs of this machine, read from NVIDIA's management library (NVML)."""

from collections.abc import Callable, Sequence
from contextlib import suppress
from importlib import import_module
from typing import Any, NamedTuple

VISIBLE = "CUDA_VISIBLE_DEVICES"
"""The environment variable with the GPUs that are visible to CUDA."""


SLICE = "MIG-"
"""Beginning of the UUID of a slice of a GPU."""


class DriverError(Exception):
    """NVIDIA's driver is installed but fails; the message is the driver's."""


class GPU(NamedTuple):
    """A GPU.

    Attributes:
        number: Index of the GPU.
        uuid: UUID of the GPU.
        name: Product name.
        total: Bytes of memory; None: not reported.
        reserved: Bytes that the driver reserves.
        used: Bytes that programs use.
        free: Free bytes; None: not reported.
        capability: CUDA compute capability, such as 8.9; None: unknown.
        slices: The slices into which MIG divides the GPU; None: it is whole, or a slice itself.
    """

    number: int
    uuid: str
    name: str
    total: int | None = None
    reserved: int = 0
    used: int = 0
    free: int | None = None
    capability: float | None = None
    slices: "tuple[GPU, ...] | None" = None


class GPUProcess(NamedTuple):
    """A process that uses memory of a GPU.

    Attributes:
        pid: Process id.
        name: Name of the program.
        memory: Bytes; None: unknown.
    """

    pid: int
    name: str
    memory: int | None


class Devices(NamedTuple):
    """The driver's report.

    Attributes:
        driver: Version of the driver, such as "570.86.15".
        cuda: The newest CUDA version that the driver supports, such as (12, 8).
        gpus: The GPUs.
        holders: The processes that use GPU memory.
    """

    driver: str
    cuda: tuple[int, int]
    gpus: tuple[GPU, ...] = ()
    holders: tuple[GPUProcess, ...] = ()


def read_devices(library: Any = None) -> Devices | None:
    """Return the report of NVIDIA's driver; None if there is no driver.

    Args:
        library: NVIDIA's library; default: the package `nvidia-ml-py`.

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
    """Return the GPUs that are visible to a program; like CUDA, stop at the first invalid name.

    Args:
        gpus: All GPUs.
        names: `CUDA_VISIBLE_DEVICES`: indexes, UUIDs or prefixes of UUIDs, also of slices; None: all GPUs are
            visible.
    """
    if names is None:
        return list(gpus)
    shown: list[GPU] = []
    for name in filter(None, (part.strip() for part in names.split(","))):
        if name.startswith((SLICE, "GPU-")):
            there = [one for gpu in gpus for one in (gpu, *(gpu.slices or ()))]
            match = [gpu for gpu in there if gpu.uuid.startswith(name)]
        else:
            match = [gpu for gpu in gpus if str(gpu.number) == name]
        if len(match) != 1:
            break
        shown += match
    return shown


def _gpu(nvml: Any, number: int, handle: Any) -> GPU:
    def told(ask: Callable[..., Any], *arguments: Any) -> Any:
        """Return the driver's answer; None if this GPU doesn't support the query."""
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
        _slices(nvml, number, handle) if divided and divided[0] else None,
    )


def _slices(nvml: Any, number: int, handle: Any) -> tuple[GPU, ...]:
    """Return the slices of a GPU; a driver lists places without a slice too."""
    found = []
    for place in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        with suppress(nvml.NVMLError):
            found.append(_gpu(nvml, number, nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, place)))
    return tuple(found)


def _holders(nvml: Any, handle: Any) -> list[GPUProcess]:
    found = []
    with suppress(nvml.NVMLError):
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle):
            name = "a process"
            with suppress(nvml.NVMLError):
                name = nvml.nvmlSystemGetProcessName(process.pid)
            found.append(GPUProcess(process.pid, name, process.usedGpuMemory))
    return found
