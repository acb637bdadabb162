"""GPUs by what `nvidia-smi` prints."""

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from serve_app.models.devices import Gpu, Machine, available_memory, find_gpus, find_machine
from serve_app.models.errors import ModelError
from serve_app.models.gpus import MIB

L4 = "0, GPU-1111, NVIDIA L4, 23034, 471, 1, 22562, 8.9, [N/A]\n"
FOUR = "".join(
    f"{number}, GPU-{number}aaa, NVIDIA H100 80GB HBM3, 81559, 520, {used}, 1, 9.0, Disabled\n"
    for number, used in enumerate((1, 1, 40_000, 1))
)


class Answer:
    """`nvidia-smi` that prints a text, or fails."""

    def __init__(self, text: str | Exception) -> None:
        self.text = text
        self.commands: list[list[str]] = []

    def __call__(self, command: Sequence[str]) -> str:
        self.commands.append(list(command))
        if isinstance(self.text, Exception):
            raise self.text
        return self.text


def test_a_gpu_has_its_memory_without_that_of_the_driver() -> None:
    assert find_gpus(Answer(L4), None) == (Gpu("NVIDIA L4", (23034 - 471) * MIB, MIB, 8.9),)


def test_gpus_are_asked_for_all_fields_at_once() -> None:
    answer = Answer(FOUR)
    assert [gpu.used // MIB for gpu in find_gpus(answer, None)] == [1, 1, 40_000, 1]
    ((program, query, _),) = answer.commands
    assert program == "nvidia-smi"
    assert query.count(",") == L4.count(",")


@pytest.mark.parametrize(
    "answer",
    [
        FileNotFoundError("nvidia-smi"),
        subprocess.CalledProcessError(9, "nvidia-smi"),
        "",
        "No devices were found\n",
    ],
    ids=["no driver", "the driver fails", "nothing", "no devices"],
)
def test_without_a_device_there_are_no_gpus(answer: str | Exception) -> None:
    assert find_gpus(Answer(answer), None) == ()


@pytest.mark.parametrize(
    ("visible", "used"),
    [
        ("2", [40_000]),
        ("2, 0", [40_000, 1]),
        ("GPU-2a", [40_000]),
        ("", []),
        ("-1", []),
        ("0,9,1", [1]),
        ("GPU-", []),
    ],
)
def test_cuda_visible_devices_chooses_as_in_cuda(visible: str, used: list[int]) -> None:
    assert [gpu.used // MIB for gpu in find_gpus(Answer(FOUR), visible)] == used


@pytest.mark.parametrize(
    ("text", "visible", "message"),
    [
        (L4.replace("[N/A]", "Enabled"), None, "divided by MIG"),
        (L4, "MIG-1234", "a slice of a GPU"),
        (L4.replace("23034", "[N/A]"), None, "doesn't tell its memory"),
        (subprocess.TimeoutExpired("nvidia-smi", 20), None, "gave no answer within 20 s"),
    ],
    ids=["mig", "slice", "no memory", "hangs"],
)
def test_a_gpu_without_known_memory_is_refused(
    text: str | Exception, visible: str | None, message: str
) -> None:
    with pytest.raises(ModelError, match=message):
        find_gpus(Answer(text), visible)


def test_a_gpu_that_tells_no_capability_is_taken() -> None:
    (gpu,) = find_gpus(Answer(L4.replace("8.9", "[N/A]")), None)
    assert gpu.capability is None


def test_this_machine_has_cores_and_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    found = find_machine({})
    assert isinstance(found, Machine)
    assert found.gpus == ()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory > 1 << 20


def write_memory(root: Path, limit: str | None, used: int = 0, cached: int = 0) -> Path:
    (root / "proc").mkdir(parents=True)
    (root / "proc/meminfo").write_text(
        "MemTotal: 16000000 kB\nMemAvailable: 12000000 kB\nHugePages_Total: 0\n"
    )
    group = root / "sys/fs/cgroup"
    group.mkdir(parents=True)
    if limit is not None:
        (group / "memory.max").write_text(f"{limit}\n")
        (group / "memory.current").write_text(f"{used}\n")
        (group / "memory.stat").write_text(f"anon {used - cached}\ninactive_file {cached}\n")
    return root


@pytest.mark.parametrize(
    ("limit", "used", "cached", "available"),
    [
        (None, 0, 0, 12_288_000_000),
        ("max", 5, 5, 12_288_000_000),
        ("8000000000", 6_000_000_000, 5_000_000_000, 7_000_000_000),
        ("99000000000", 1_000_000_000, 0, 12_288_000_000),
        ("1000", 5_000, 0, 0),
    ],
)
def test_the_memory_of_a_container_has_its_limit(
    tmp_path: Path, limit: str | None, used: int, cached: int, available: int
) -> None:
    assert available_memory(write_memory(tmp_path, limit, used, cached)) == available
