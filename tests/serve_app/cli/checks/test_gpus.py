"""Checks of the GPUs."""

from typing import Any

import pytest

from serve_app.cli.checks.gpus import check_driver, check_gpus, torch_cuda
from serve_app.cli.checks.plan import Deployment, Plan
from serve_app.cli.machine import CommandError
from tests.serve_app.cli.checks.machines import FakeMachine, case, plan

HEAD = "| NVIDIA-SMI 570.86.15    Driver Version: 570.86.15    CUDA Version: 12.8     |\n"
CUDA_12_8 = "__version__ = '2.13.0+cu128'\ncuda: Optional[str] = '12.8'\nhip: Optional[str] = None\n"
CUDA_13 = "__version__ = '2.13.0'\ncuda = '13.0'\n"


def row(index: int = 0, name: str = "NVIDIA L4", total: str = "23034", free: str = "22563") -> str:
    """Return a line of the table of GPUs."""
    return f"{index}, GPU-{index}f1c, {name}, {total}, 471, 0, {free}, 8.9, [N/A]\n"


L4 = row()
ENGINE = Deployment("Engine:m", 1, 1.0, 1.0)


def said(gpus: str = L4, holders: str = "", head: str = HEAD) -> dict[str, Any]:
    return {"": head, "--query-gpu": gpus, "--query-compute-apps": holders}


def needing(gpus: float = 1.0, **engine: Any) -> Plan:
    return plan(Deployment("Engine:m", 1, 1.0, gpus), models=[{"id": "m", "source": "o/m", "engine": engine}])


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
    found = check_driver(case(plan=needing()))
    assert (found.level, found.text) == ("problem", "no GPU here, and the config reserves 1")


def test_the_gpus_of_a_cluster_are_elsewhere() -> None:
    assert check_driver(case(plan=needing(), address="head:6379")).level == "ok"


@pytest.mark.parametrize(
    ("torch", "head", "level", "text"),
    [
        (CUDA_12_8, HEAD, "ok", "driver 570.86.15, CUDA up to 12.8, torch for 12.8"),
        (CUDA_12_8, HEAD.replace("12.8", "13.0"), "ok", "CUDA up to 13.0, torch for 12.8"),
        (CUDA_12_8, HEAD.replace("CUDA Version", "CUDA UMD Version"), "ok", "CUDA up to 12.8"),
        (
            CUDA_12_8,
            HEAD.replace("12.8", "12.4"),
            "warning",
            "runs CUDA up to 12.4, and torch is built for 12.8",
        ),
        (CUDA_13, HEAD, "problem", "driver 570.86.15 runs CUDA up to 12.8, and torch is built for 13.0"),
        (CUDA_13, "nothing that is known", "ok", "torch for CUDA 13.0"),
        ("cuda = None", HEAD, "warning", "torch is a build without CUDA"),
    ],
)
def test_the_driver_runs_the_cuda_of_torch(torch: str, head: str, level: str, text: str) -> None:
    found = check_driver(case(FakeMachine(torch=torch, said=said(head=head))))
    assert found.level == level
    assert text in found.text
    assert bool(found.fix) == (level != "ok")


def test_a_cpu_build_of_torch_is_a_problem_for_a_config_with_gpus() -> None:
    assert check_driver(case(FakeMachine(said=said()), needing())).level == "problem"


def test_a_driver_that_fails() -> None:
    machine = FakeMachine(
        said={"": CommandError("Failed to initialize NVML: Driver/library version mismatch")}
    )
    assert check_driver(case(machine)).level == "warning"
    found = check_driver(case(machine, needing()))
    assert (found.level, "version mismatch" in found.text) == ("problem", True)
    machine = FakeMachine(said={"--query-gpu": CommandError("Failed")})
    assert check_gpus(case(machine)) is None


def test_free_gpus() -> None:
    found = check_gpus(case(FakeMachine(said=said()), needing()))
    assert found
    assert (found.level, found.text) == ("ok", "0 NVIDIA L4 (23.7 GB of 24.2 GB free)")


def test_more_gpus_than_there_are() -> None:
    found = check_gpus(case(FakeMachine(said=said()), needing(2.0)))
    assert found
    assert found.level == "problem"
    assert "1 GPUs are visible, and the config reserves 2" in found.text


@pytest.mark.parametrize(("visible", "number"), [("", 0), ("-1", 0), ("1", 1), ("0,1", 2), ("GPU-1f", 1)])
def test_hidden_gpus_do_not_count(visible: str, number: int) -> None:
    gpus = L4 + row(1)
    machine = FakeMachine(environment={"CUDA_VISIBLE_DEVICES": visible}, said=said(gpus))
    found = check_gpus(case(machine, needing(3.0)))
    assert found
    assert f"{number} GPUs are visible" in found.text
    assert ("CUDA_VISIBLE_DEVICES hides" in found.text) == (number < 2)


def test_a_gpu_that_others_have_filled() -> None:
    full = said(row(free="3000"), "77, 20034, /usr/bin/python3\n")
    found = check_gpus(case(FakeMachine(said=full), needing(gpu_memory_utilization=0.9)))
    assert found
    assert found.level == "problem"
    assert found.text == (
        "m takes 21.7 GB of GPU 0, and 3.1 GB are free; in use by /usr/bin/python3 (pid 77, 21.0 GB)"
    )
    assert "engine.gpu_memory_utilization" in found.fix
    small = check_gpus(case(FakeMachine(said=full), needing(gpu_memory_utilization=0.1)))
    assert small
    assert small.level == "ok"


def test_the_freest_gpu_counts() -> None:
    found = check_gpus(
        case(FakeMachine(said=said(row(0, "A", "20000", "10") + row(1, "B", "20000", "19900"))), needing())
    )
    assert found
    assert found.level == "ok"


def test_without_a_config_processes_on_a_gpu_are_a_warning() -> None:
    found = check_gpus(case(FakeMachine(said=said(holders="77, [N/A], python\n"))))
    assert found
    assert found.level == "warning"
    assert "python (pid 77, ?)" in found.text


def test_memory_that_can_not_be_told_is_no_finding() -> None:
    found = check_gpus(case(FakeMachine(said=said(row(0, "NVIDIA GB10", "[N/A]", "[N/A]"))), needing()))
    assert found
    assert found.text == "0 NVIDIA GB10 (? of ? free)"
