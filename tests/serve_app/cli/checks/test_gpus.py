"""Checks of the GPUs."""

from typing import Any

import pytest

from serve_app.cli.checks.gpus import check_driver, check_gpus, torch_cuda
from serve_app.cli.checks.needs import Deployment, Needs
from serve_app.system.gpus import GPU, Devices, DriverError, GPUProcess
from tests.serve_app.cli.checks.machines import FakeMachine, case, needs_of

CUDA_12_8 = "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
CUDA_13 = "__version__ = '2.13.0'\ncuda = '13.0'\n"


MIB = 1 << 20


def gpu(number: int = 0, name: str = "NVIDIA L4", total: int | None = 23034, free: int | None = 22563) -> GPU:
    """Return a GPU; its memory in MiB, None: it doesn't tell."""
    sizes = (total and total * MIB, 471 * MIB, 0, free and free * MIB)
    return GPU(number, f"GPU-{number}f1c", name, *sizes, 8.9)


def told(*gpus: GPU, holders: tuple[GPUProcess, ...] = (), cuda: tuple[int, int] = (12, 8)) -> Devices:
    return Devices("570.86.15", cuda, gpus or (gpu(),), holders)


ENGINE = Deployment("Engine:m", 1, 1.0, 1.0)


def needing(gpus: float = 1.0, **engine: Any) -> Needs:
    return needs_of(
        Deployment("Engine:m", 1, 1.0, gpus), models=[{"id": "m", "source": "o/m", "engine": engine}]
    )


@pytest.mark.parametrize(
    ("text", "cuda"),
    [
        (CUDA_12_8, "12.8"),
        (CUDA_13, "13.0"),
        ("cuda: Optional[str] = None\nhip: Optional[str] = '6.0'", None),
    ],
)
def test_the_cuda_of_torch(text: str, cuda: str | None) -> None:
    assert torch_cuda(FakeMachine(torch=text)) == cuda


def test_a_machine_without_a_gpu() -> None:
    found = check_driver(case())
    assert (found.level, found.text) == ("ok", "no GPU: CPU configs only")
    assert check_gpus(case()) is None
    found = check_driver(case(FakeMachine(torch=CUDA_13)))
    assert (found.level, found.text) == ("warning", "no GPU: CPU configs only; torch is built for CUDA 13.0")
    found = check_driver(case(needs=needing()))
    assert (found.level, found.text) == ("problem", "no GPU here, and the config reserves 1")


def test_the_gpus_of_a_cluster_are_elsewhere() -> None:
    assert check_driver(case(needs=needing(), address="head:6379")).level == "ok"


@pytest.mark.parametrize(
    ("torch", "cuda", "level", "text"),
    [
        (CUDA_12_8, (12, 8), "ok", "driver 570.86.15, CUDA up to 12.8, torch for 12.8"),
        (CUDA_12_8, (13, 0), "ok", "CUDA up to 13.0, torch for 12.8"),
        (CUDA_12_8, (12, 4), "warning", "runs CUDA up to 12.4, and torch is built for 12.8"),
        (CUDA_13, (12, 8), "problem", "driver 570.86.15 runs CUDA up to 12.8, and torch is built for 13.0"),
        ("cuda = None", (12, 8), "warning", "torch is a build without CUDA"),
    ],
)
def test_the_driver_runs_the_cuda_of_torch(torch: str, cuda: tuple[int, int], level: str, text: str) -> None:
    found = check_driver(case(FakeMachine(torch=torch, gpus=told(cuda=cuda))))
    assert found.level == level
    assert text in found.text
    assert bool(found.fix) == (level != "ok")


def test_a_cpu_build_of_torch_is_a_problem_for_a_config_with_gpus() -> None:
    assert check_driver(case(FakeMachine(gpus=told()), needing())).level == "problem"


def test_a_driver_that_fails() -> None:
    machine = FakeMachine(gpus=DriverError("Driver/library version mismatch"))
    assert check_driver(case(machine)).level == "warning"
    found = check_driver(case(machine, needing()))
    assert (found.level, "version mismatch" in found.text) == ("problem", True)
    assert check_gpus(case(machine)) is None


def test_free_gpus() -> None:
    found = check_gpus(case(FakeMachine(gpus=told()), needing()))
    assert found
    assert (found.level, found.text) == ("ok", "0 NVIDIA L4 (23.7 GB of 24.2 GB free)")


def test_more_gpus_than_there_are() -> None:
    found = check_gpus(case(FakeMachine(gpus=told()), needing(2.0)))
    assert found
    assert found.level == "problem"
    assert "1 GPUs are visible, and the config reserves 2" in found.text


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("GPU-1f", 1)])
def test_hidden_gpus_do_not_count(visible: str, number: int) -> None:
    machine = FakeMachine(environment={"CUDA_VISIBLE_DEVICES": visible}, gpus=told(gpu(), gpu(1)))
    found = check_gpus(case(machine, needing(3.0)))
    assert found
    assert f"{number} GPUs are visible" in found.text
    assert ("CUDA_VISIBLE_DEVICES hides" in found.text) == (number < 2)


def test_a_gpu_that_others_have_filled() -> None:
    full = told(gpu(free=3000), holders=(GPUProcess(77, "/usr/bin/python3", 20034 * MIB),))
    found = check_gpus(case(FakeMachine(gpus=full), needing(gpu_memory_utilization=0.9)))
    assert found
    assert found.level == "problem"
    assert found.text == (
        "m takes 21.7 GB of GPU 0, and 3.1 GB are free; in use by /usr/bin/python3 (pid 77, 21.0 GB)"
    )
    assert "engine.gpu_memory_utilization" in found.fix
    small = check_gpus(case(FakeMachine(gpus=full), needing(gpu_memory_utilization=0.1)))
    assert small
    assert small.level == "ok"


def test_the_freest_gpu_counts() -> None:
    both = told(gpu(0, "A", 20000, 10), gpu(1, "B", 20000, 19900))
    found = check_gpus(case(FakeMachine(gpus=both), needing()))
    assert found
    assert found.level == "ok"


def test_without_a_config_processes_on_a_gpu_are_a_warning() -> None:
    found = check_gpus(case(FakeMachine(gpus=told(holders=(GPUProcess(77, "python", None),)))))
    assert found
    assert found.level == "warning"
    assert "python (pid 77, ?)" in found.text


def test_memory_that_can_not_be_told_is_no_finding() -> None:
    found = check_gpus(case(FakeMachine(gpus=told(gpu(0, "NVIDIA GB10", None, None))), needing()))
    assert found
    assert found.text == "0 NVIDIA GB10 (? of ? free)"
