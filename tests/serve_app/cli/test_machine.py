"""Facts of a machine."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.cli.machine import MachineFacts, Owned
from serve_app.cli.runs import MARK
from tests.ports import free_port


def write(path: Path, text: object) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"{text}\n")


def test_versions_and_files_of_packages() -> None:
    here = MachineFacts()
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
    assert MachineFacts().has_byte_code("compiled_or_not") is False
    write(package / "__pycache__" / f"__init__.{sys.implementation.cache_tag}.pyc", "")
    assert MachineFacts().has_byte_code("compiled_or_not") is True


def test_programs() -> None:
    here = MachineFacts()
    assert here.find_program("sh") == shutil.which("sh")


def test_files_and_space(tmp_path: Path) -> None:
    here = MachineFacts()
    write(tmp_path / "a", "text")
    assert here.read(tmp_path / "a") == "text\n"
    assert here.read(tmp_path / "no") is None
    space = here.space(tmp_path / "not" / "yet" / "made")
    assert 0 < space.free <= space.total
    assert here.may_write(tmp_path / "not" / "yet")


def test_the_owner_of_a_file_and_of_a_link(tmp_path: Path) -> None:
    here, file, link = MachineFacts(), tmp_path / "file", tmp_path / "link"
    assert here.owned(file) is None
    file.touch()
    file.chmod(0o640)
    link.symlink_to(file)
    assert here.owned(file) == Owned(True, 0o640)
    assert here.owned(link) == Owned(False, 0o640)


def test_ports_and_the_programs_that_listen(taken: int) -> None:
    here = MachineFacts()
    assert "Address already in use" in here.port_refusal("127.0.0.1", taken)
    assert os.getpid() in [one.pid for one in here.listeners(taken)]
    assert here.port_refusal("127.0.0.1", free_port()) == ""
    assert "192.0.2.1" in here.port_refusal("192.0.2.1", free_port())


def test_the_mark_of_a_process_is_in_its_environment() -> None:
    here = MachineFacts()
    with subprocess.Popen(["sh", "-c", "echo; read line"], env={MARK: "x"}, stdin=-1, stdout=-1) as process:
        assert process.stdout
        process.stdout.readline()
        assert (here.mark_of(process.pid), here.mark_of(os.getpid())) == ("x", "")
        process.communicate(b"\n")


def test_processes_of_this_user() -> None:
    mine = next(one for one in MachineFacts().processes() if one.pid == os.getpid())
    assert (mine.parent, bool(mine.name)) == (os.getppid(), True)


def test_this_machine_has_memory_and_limits() -> None:
    here = MachineFacts()
    total, free = here.memory()
    assert 0 < free <= total
    assert len(here.open_files()) == 2
