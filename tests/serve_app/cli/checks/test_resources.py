"""Checks of open files, shared memory, disk, cores and memory."""

import pytest

from serve_app.cli.checks.finding import GIB
from serve_app.cli.checks.needs import Deployment, Needs
from serve_app.cli.checks.resources import (
    check_cores,
    check_disk,
    check_memory,
    check_open_files,
    check_shared_memory,
)
from serve_app.system.limits import Space
from tests.serve_app.cli.checks.machines import FakeMachine, case, needs_of

MODEL = {"id": "m", "source": "o/m"}


@pytest.mark.parametrize(
    ("hard", "level", "text"),
    [
        (65_536, "ok", "65,536"),
        (-1, "ok", "no limit"),
        (20_000, "warning", "20,000 are allowed: HAProxy has 9,950 connections instead of 12,000"),
        (4096, "problem", "4,096 are allowed, and HAProxy needs 8,292"),
    ],
)
def test_open_files(hard: int, level: str, text: str) -> None:
    found = check_open_files(case(FakeMachine(files=(1024, hard))))
    assert found
    assert found.level == level
    assert found.text.startswith(text)
    assert ("nofile=65536" in found.fix) == (level != "ok")


def test_only_haproxy_needs_so_many_files() -> None:
    assert check_open_files(case(FakeMachine(files=(64, 64)), Needs(haproxy=False))) is None


@pytest.mark.parametrize(
    ("total", "free", "gpus", "level"),
    [
        (8.0, 8.0, 1, "ok"),
        (8.0, 8.0, 2, "ok"),
        (0.0625, 0.0625, 1, "warning"),
        (0.0625, 0.0625, 2, "problem"),
        (8.0, 0.1, 1, "warning"),
        (8.0, 0.1, 2, "problem"),
    ],
)
def test_shared_memory(total: float, free: float, gpus: int, level: str) -> None:
    space = Space(int(total * GIB), int(free * GIB))
    needs = needs_of(models=[MODEL | {"engine": {"tensor_parallel_size": gpus}}])
    found = check_shared_memory(case(FakeMachine(spaces={"/dev/shm": space}), needs))
    assert found.level == level
    assert bool(found.fix) == (level != "ok")
    if total < 1:
        assert "/dev/shm has 64 MiB" in found.text


@pytest.mark.parametrize(
    ("total", "free", "level"),
    [(500, 300, "ok"), (500, 20, "problem"), (50, 4, "warning"), (50, 2, "problem")],
)
def test_the_disk_of_ray(total: int, free: int, level: str) -> None:
    machine = FakeMachine(
        environment={"RAY_TMPDIR": "/big"}, spaces={"/big/ray": Space(total * GIB, free * GIB)}
    )
    found = check_disk(case(machine))
    assert found
    assert found.level == level
    assert "/big/ray" in found.text
    assert ("RAY_TMPDIR" in found.fix) == (level != "ok")


@pytest.mark.parametrize(
    ("have", "reserved", "level"),
    [(8.0, 6.0, "ok"), (2.0, 1.5, "ok"), (2.5, 2.5, "problem"), (2.0, 5.0, "problem"), (1.0, 0.0, "warning")],
)
def test_cores(have: float, reserved: float, level: str) -> None:
    needs = needs_of(Deployment("Ingress", 1, 0.5, 0), Deployment("Engine:m", 2, (reserved - 0.5) / 2, 0))
    found = check_cores(case(FakeMachine(have=have), needs if reserved else Needs()))
    assert found.level == level
    if level == "problem":
        assert f"the config reserves {reserved:g} (Ingress 1 x 0.5, Engine:m 2 x " in found.text
        assert "num_cpus" in found.fix


def test_the_cores_of_a_cluster_are_elsewhere() -> None:
    found = check_cores(
        case(FakeMachine(have=1.0), needs_of(Deployment("Ingress", 9, 1, 0)), address="head:6379")
    )
    assert found.level == "ok"


@pytest.mark.parametrize(
    ("total", "free", "level", "text"),
    [
        (32, 24, "ok", "24.0 GiB of 32.0 GiB free"),
        (32, 5, "problem", "a service needs 8.0 GiB and its weights"),
        (512, 20, "problem", "Ray ends workers once 95% are in use"),
    ],
)
def test_memory(total: int, free: int, level: str, text: str) -> None:
    needs = needs_of(
        Deployment("Engine:m", 2, 1, 0), models=[MODEL | {"engine": {"kv_cache_memory_bytes": 3 * GIB}}]
    )
    found = check_memory(case(FakeMachine(room=Space(total * GIB, free * GIB)), needs))
    assert found.level == level
    assert text in found.text
    assert bool(found.fix) == (level != "ok")


def test_the_kv_cache_of_a_gpu_is_not_in_the_memory() -> None:
    needs = needs_of(
        Deployment("Engine:m", 2, 1, 1), models=[MODEL | {"engine": {"kv_cache_memory_bytes": 90 * GIB}}]
    )
    assert check_memory(case(needs=needs)).level == "ok"
