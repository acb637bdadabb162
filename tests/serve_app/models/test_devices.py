"""What a model can have of the devices of a machine."""

import os

import pytest

from serve_app.models.devices import Machine, UsableGPU, find_gpus, find_machine
from serve_app.models.errors import ModelError
from serve_app.system.gpus import GPU

MIB = 1 << 20
L4 = GPU(0, "GPU-1111", "NVIDIA L4", 23034 * MIB, 471 * MIB, MIB, 22562 * MIB, 8.9)
SLICE = GPU(0, "MIG-1aaa", "NVIDIA H100 80GB HBM3 MIG 1g.10gb", 10_000 * MIB, 15 * MIB, MIB, MIB, 9.0)
FOUR = [
    GPU(number, f"GPU-{number}aaa", "NVIDIA H100 80GB HBM3", 81559 * MIB, 520 * MIB, used * MIB, MIB, 9.0)
    for number, used in enumerate((1, 1, 40_000, 1))
]


def test_a_gpu_has_its_memory_without_that_of_the_driver() -> None:
    assert find_gpus([L4], None) == (UsableGPU("NVIDIA L4", (23034 - 471) * MIB, MIB, 8.9),)


def test_hidden_gpus_are_not_used() -> None:
    # tests/serve_app/system/test_gpus.py has all forms of CUDA_VISIBLE_DEVICES.
    assert [gpu.used // MIB for gpu in find_gpus(FOUR, None)] == [1, 1, 40_000, 1]
    assert [gpu.used // MIB for gpu in find_gpus(FOUR, "2, 0")] == [40_000, 1]


@pytest.mark.parametrize(
    ("gpu", "visible", "message"),
    [
        (
            L4._replace(slices=(SLICE,)),
            None,
            r"set CUDA_VISIBLE_DEVICES to one of its slices: MIG-1aaa \(10\.5 GB\)",
        ),
        (L4._replace(slices=()), None, "its slices: none"),
        (L4._replace(total=None), None, "doesn't report its memory"),
    ],
    ids=["slices", "no slices", "no memory"],
)
def test_a_gpu_without_known_memory_is_refused(gpu: GPU, visible: str | None, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        find_gpus([gpu], visible)


def test_a_slice_has_its_own_memory_and_ray_counts_whole_gpus() -> None:
    other = SLICE._replace(uuid="MIG-2aaa")
    (found,) = find_gpus([L4._replace(slices=(other, SLICE))], "MIG-1aaa,MIG-2aaa")
    assert found == UsableGPU(SLICE.name, 9_985 * MIB, MIB, 9.0, True)


def test_a_gpu_that_tells_no_capability_is_taken() -> None:
    (gpu,) = find_gpus([L4._replace(capability=None)], None)
    assert gpu.capability is None


def test_this_machine_has_cores_and_memory() -> None:
    found = find_machine({"CUDA_VISIBLE_DEVICES": ""})
    assert isinstance(found, Machine)
    assert found.gpus == ()
    assert 1 <= found.cores <= (os.cpu_count() or 1)
    assert found.memory > 1 << 20


def test_nodes_count_that_have_the_gpus_of_this_machine() -> None:
    own = {"CPU": 64.0, "GPU": 8.0, "accelerator_type:H100": 1.0}
    others = [own, own | {"GPU": 4.0}, {"CPU": 8.0}, {"GPU": 8.0, "accelerator_type:A100": 1.0}]
    assert Machine((), 64, 1 << 40, (own, *others)).nodes == 2
    # A head without GPUs says nothing about the others.
    assert Machine((), 8, 1 << 40, ({"CPU": 8.0}, own)).nodes == Machine((), 8, 1 << 40).nodes == 1
