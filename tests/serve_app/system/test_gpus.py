"""GPUs as NVIDIA's library tells them."""

from types import SimpleNamespace
from typing import Any

import pytest

from serve_app.system.gpus import GPU, Devices, DriverError, GPUProcess, read_devices, visible_gpus

MIB = 1 << 20
MIG = {"nvmlDeviceGetMigMode", "nvmlDeviceGetMaxMigDeviceCount", "nvmlDeviceGetMigDeviceHandleByIndex"}


class NVMLError(Exception):
    pass


class NVMLError_LibraryNotFound(NVMLError):  # noqa: N801, N818
    pass


class NVMLError_DriverNotLoaded(NVMLError):  # noqa: N801, N818
    pass


class Library:
    """NVIDIA's library with two GPUs, of which the second tells little.

    Args:
        broken: What its start raises.
    """

    NVMLError = NVMLError
    NVMLError_LibraryNotFound = NVMLError_LibraryNotFound
    NVMLError_DriverNotLoaded = NVMLError_DriverNotLoaded
    nvmlMemory_v2 = 2  # noqa: N815

    def __init__(self, broken: Exception | None = None) -> None:
        self.broken = broken
        self.open = False

    def nvmlInit(self) -> None:  # noqa: N802
        if self.broken:
            raise self.broken
        self.open = True

    def nvmlShutdown(self) -> None:  # noqa: N802
        self.open = False

    def __getattr__(self, name: str) -> Any:
        answers: dict[str, Any] = {
            "nvmlSystemGetCudaDriverVersion_v2": lambda: 12080,
            "nvmlSystemGetDriverVersion": lambda: "570.86.15",
            "nvmlDeviceGetCount": lambda: 2,
            "nvmlDeviceGetHandleByIndex": lambda number: number,
            "nvmlDeviceGetUUID": lambda number: f"{'MIG' if number == 2 else 'GPU'}-{number}aaa",
            "nvmlDeviceGetName": lambda number: ("NVIDIA H100 80GB HBM3", "NVIDIA GB10", "MIG 1g")[number],
            "nvmlDeviceGetMemoryInfo": lambda number, version: SimpleNamespace(
                total=81559 * MIB, reserved=520 * MIB, used=40000 * MIB, free=41039 * MIB
            ),
            "nvmlDeviceGetCudaComputeCapability": lambda number: (9, 0),
            "nvmlDeviceGetMigMode": lambda number: (number == 1, number),
            "nvmlDeviceGetMaxMigDeviceCount": lambda number: 3,
            "nvmlDeviceGetMigDeviceHandleByIndex": lambda number, place: (2,)[place],
            "nvmlDeviceGetComputeRunningProcesses": lambda number: [
                SimpleNamespace(pid=77, usedGpuMemory=None)
            ],
            "nvmlSystemGetProcessName": lambda pid: "python",
        }

        def answer(*arguments: Any) -> Any:
            if arguments[1:] in ((1,), (2,)) and name == "nvmlDeviceGetMigDeviceHandleByIndex":
                raise NVMLError("Not Found")
            known_by_all = {"nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID", "nvmlDeviceGetName"}
            if arguments[:1] == (1,) and name not in known_by_all | MIG:
                raise NVMLError("Not Supported")
            return answers[name](*arguments)

        return answer


def test_all_that_the_driver_tells() -> None:
    library = Library()
    sizes = (81559 * MIB, 520 * MIB, 40000 * MIB, 41039 * MIB)
    first = GPU(0, "GPU-0aaa", "NVIDIA H100 80GB HBM3", *sizes, 9.0)
    part = GPU(1, "MIG-2aaa", "MIG 1g", *sizes, 9.0)
    second = GPU(1, "GPU-1aaa", "NVIDIA GB10", slices=(part,))
    assert read_devices(library) == Devices(
        "570.86.15", (12, 8), (first, second), (GPUProcess(77, "python", None),)
    )
    assert not library.open


@pytest.mark.parametrize("kind", [NVMLError_LibraryNotFound, NVMLError_DriverNotLoaded])
def test_without_a_driver_there_is_nothing_to_tell(kind: type[Exception]) -> None:
    assert read_devices(Library(kind("no driver"))) is None


def test_a_driver_that_fails_says_why() -> None:
    with pytest.raises(DriverError, match="version mismatch"):
        read_devices(Library(NVMLError("Driver/library version mismatch")))


def test_this_machine_has_a_driver_or_none() -> None:
    found = read_devices()
    assert found is None or found.driver


@pytest.mark.parametrize(
    ("names", "shown"),
    [
        (None, "01"),
        ("", ""),
        ("-1", ""),
        ("1", "1"),
        ("1,0", "10"),
        ("0,7,1", "0"),
        ("GPU-1", "1"),
        ("GPU-", ""),
    ],
)
def test_names_show_gpus_as_in_cuda(names: str | None, shown: str) -> None:
    gpus = [GPU(0, "GPU-0aaa", "a"), GPU(1, "GPU-1aaa", "b")]
    assert "".join(str(gpu.number) for gpu in visible_gpus(gpus, names)) == shown
