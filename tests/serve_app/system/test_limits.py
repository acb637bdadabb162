"""Cores and memory within a control group."""

import os
from pathlib import Path

import pytest

from serve_app.system.limits import Space, available_cores, available_memory

GIB = 1 << 30
MACHINE = Space(64 * GIB, 40 * GIB)


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_cores_without_a_group_are_those_of_the_process(groups: Path) -> None:
    assert available_cores(groups) == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "least"), [("50000 100000", 0.5), ("max 100000", None)])
def test_cores_of_a_group(groups: Path, text: str, least: float | None) -> None:
    write(groups / "cpu.max", text)
    assert available_cores(groups) == (least or len(os.sched_getaffinity(0)))


def test_cores_of_an_old_group(groups: Path) -> None:
    write(groups / "cpu/cpu.cfs_quota_us", 25_000)
    write(groups / "cpu/cpu.cfs_period_us", 100_000)
    assert available_cores(groups) == 0.25
    write(groups / "cpu/cpu.cfs_quota_us", -1)
    assert available_cores(groups) == len(os.sched_getaffinity(0))


def test_memory_without_a_group(groups: Path) -> None:
    assert available_memory(groups, MACHINE) == (64 * GIB, 40 * GIB)


def test_memory_of_a_group(groups: Path) -> None:
    write(groups / "memory.max", 8 * GIB)
    write(groups / "memory.current", 5 * GIB)
    write(groups / "memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert available_memory(groups, MACHINE) == (8 * GIB, 5 * GIB)
    # A machine that is fuller than its groups allow.
    assert available_memory(groups, Space(64 * GIB, GIB)) == (8 * GIB, GIB)
    write(groups / "memory.max", "max")
    assert available_memory(groups, MACHINE) == (64 * GIB, 40 * GIB)


def test_memory_of_an_old_group(groups: Path) -> None:
    write(groups / "memory/memory.limit_in_bytes", 8 * GIB)
    write(groups / "memory/memory.usage_in_bytes", 5 * GIB)
    write(groups / "memory/memory.stat", f"total_inactive_file {GIB}")
    assert available_memory(groups, MACHINE) == (8 * GIB, 4 * GIB)
    # No limit is a very large one.
    write(groups / "memory/memory.limit_in_bytes", 9_223_372_036_854_771_712)
    assert available_memory(groups, MACHINE) == (64 * GIB, 40 * GIB)


def test_a_group_that_is_beyond_its_limit_has_nothing_left(groups: Path) -> None:
    write(groups / "memory.max", 1000)
    write(groups / "memory.current", 5000)
    assert available_memory(groups, MACHINE) == (1000, 0)


def test_this_machine_has_some() -> None:
    total, free = available_memory()
    assert 0 < free <= total
    assert 0 < available_cores() <= (os.cpu_count() or 1)
