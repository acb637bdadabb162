"""Facts of a machine."""

import os
import shutil
import sys
from pathlib import Path

import pytest

from serve_app.cli.machine import MachineFacts


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


def test_processes_of_this_user() -> None:
    mine = next(one for one in MachineFacts().processes() if one.pid == os.getpid())
    assert (mine.parent, bool(mine.name)) == (os.getppid(), True)


def test_this_machine_has_memory_and_limits() -> None:
    here = MachineFacts()
    total, free = here.memory()
    assert 0 < free <= total
    assert len(here.open_files()) == 2
