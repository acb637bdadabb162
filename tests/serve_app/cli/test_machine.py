"""Facts of a machine."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from serve_app.cli.machine import CommandError, Machine

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path: Path) -> Path:
    return tmp_path / "cgroup"


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def machine(groups: Path, total: int = 64 * GIB, available: int = 40 * GIB) -> Machine:
    processes = groups.parent / "proc"
    write(
        processes / "meminfo",
        f"MemTotal: {total // 1024} kB\nMemFree: 1 kB\nMemAvailable: {available // 1024} kB",
    )
    return Machine({}, groups, processes)


def test_versions_and_files_of_packages() -> None:
    here = Machine()
    assert here.version("click")
    assert here.version("no-such-package") is None
    assert "click" in (here.package_text("click", "__init__.py") or "")
    assert here.package_text("click", "nothing.py") is None
    assert here.package_text("no_such_package", "version.py") is None
    assert here.has_byte_code("no_such_package") is False


def test_byte_code_that_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "compiled_or_not"
    write(package / "__init__.py", "")
    monkeypatch.syspath_prepend(tmp_path)
    assert Machine().has_byte_code("compiled_or_not") is False
    write(package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc", "")
    assert Machine().has_byte_code("compiled_or_not") is True


def test_programs() -> None:
    here = Machine()
    assert here.find_program("sh") == shutil.which("sh")
    assert here.run("sh", "-c", "echo hello") == "hello\n"
    assert here.run("no-such-program") is None
    with pytest.raises(CommandError, match=r"^out of order$"):
        here.run("sh", "-c", "echo out of order; echo more; exit 3")
    with pytest.raises(CommandError, match="exit code 3"):
        here.run("sh", "-c", "exit 3")


def test_a_program_that_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("serve_app.cli.machine.COMMAND_S", 0.1)
    with pytest.raises(CommandError, match=r"no answer within 0\.1 s"):
        Machine().run("sleep", "30")


def test_files_and_space(tmp_path: Path) -> None:
    here = Machine()
    write(tmp_path / "a", "text")
    assert here.read(tmp_path / "a") == "text\n"
    assert here.read(tmp_path / "no") is None
    space = here.space(tmp_path / "not" / "yet" / "made")
    assert 0 < space.free <= space.total
    assert here.may_write(tmp_path / "not" / "yet")


def test_cores_without_a_group_are_those_of_the_process(groups: Path) -> None:
    assert Machine(groups=groups).cores() == len(os.sched_getaffinity(0))


@pytest.mark.parametrize(("text", "least"), [("50000 100000", 0.5), ("max 100000", None)])
def test_cores_of_a_group(groups: Path, text: str, least: float | None) -> None:
    write(groups / "cpu.max", text)
    assert Machine(groups=groups).cores() == (least or len(os.sched_getaffinity(0)))


def test_cores_of_an_old_group(groups: Path) -> None:
    write(groups / "cpu/cpu.cfs_quota_us", 25_000)
    write(groups / "cpu/cpu.cfs_period_us", 100_000)
    assert Machine(groups=groups).cores() == 0.25
    write(groups / "cpu/cpu.cfs_quota_us", -1)
    assert Machine(groups=groups).cores() == len(os.sched_getaffinity(0))


def test_memory_without_a_group(groups: Path) -> None:
    assert machine(groups).memory() == (64 * GIB, 40 * GIB)


def test_memory_of_a_group(groups: Path) -> None:
    write(groups / "memory.max", 8 * GIB)
    write(groups / "memory.current", 5 * GIB)
    write(groups / "memory.stat", f"anon 1\ninactive_file {2 * GIB}")
    assert machine(groups).memory() == (8 * GIB, 5 * GIB)
    # A machine that is fuller than its groups allow.
    assert machine(groups, available=GIB).memory() == (8 * GIB, GIB)
    write(groups / "memory.max", "max")
    assert machine(groups).memory() == (64 * GIB, 40 * GIB)


def test_memory_of_an_old_group(groups: Path) -> None:
    write(groups / "memory/memory.limit_in_bytes", 8 * GIB)
    write(groups / "memory/memory.usage_in_bytes", 5 * GIB)
    write(groups / "memory/memory.stat", f"total_inactive_file {GIB}")
    assert machine(groups).memory() == (8 * GIB, 4 * GIB)
    # No limit is a very large one.
    write(groups / "memory/memory.limit_in_bytes", 9_223_372_036_854_771_712)
    assert machine(groups).memory() == (64 * GIB, 40 * GIB)


def test_processes_of_this_user() -> None:
    mine = next(one for one in Machine().processes() if one.pid == os.getpid())
    assert (mine.parent, bool(mine.name)) == (os.getppid(), True)


def test_a_process_whose_name_is_cut_inside_a_character_is_one_too(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "stat").write_bytes(b"7 (mod\xc3) S 1 7 7 0")
    (process,) = Machine(processes=tmp_path).processes()
    assert (process.pid, process.parent) == (7, 1)


def test_this_machine_has_memory_and_limits() -> None:
    here = Machine()
    total, free = here.memory()
    assert 0 < free <= total
    assert len(here.open_files()) == 2
