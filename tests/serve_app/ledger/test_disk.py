"""The ledger's file system."""

import fcntl
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger.disk import LocalDisk

HOLDER = """
import sys
from pathlib import Path
from serve_app.ledger.disk import LocalDisk
disk = LocalDisk()
print(disk.lock(Path(sys.argv[1])), flush=True)
sys.stdin.read()
"""


def test_a_lock_ends_with_its_process(tmp_path: Path) -> None:
    path, disk = tmp_path / "open" / "a.lock", LocalDisk()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as holder:
        assert holder.stdout
        assert holder.stdout.readline() == "True\n"
        assert disk.locked(path)
        assert not disk.lock(path)
        holder.kill()
        holder.wait()
    assert not disk.locked(path)
    assert disk.lock(path)
    assert LocalDisk().locked(path)
    disk.unlock(path)
    assert not path.exists()


def test_a_file_is_replaced_as_a_whole_or_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, disk = tmp_path / "a", LocalDisk()
    disk.replace(path, b"one")

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        with pytest.raises(OSError, match="No space"):
            disk.replace(path, b"two")
    assert (disk.read(path), disk.files(tmp_path, "*")) == (b"one", [path])


def test_a_file_that_two_processes_replace_is_that_of_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first, second = tmp_path / "prices.json", LocalDisk(), LocalDisk()
    replace = Path.replace

    def late(draft: Path, target: Path) -> Path:
        monkeypatch.setattr(Path, "replace", replace)
        second.replace(path, b"two")
        return replace(draft, target)

    monkeypatch.setattr(Path, "replace", late)
    first.replace(path, b"one")
    assert (first.read(path), first.files(tmp_path, "*")) == (b"one", [path])


def test_a_file_grows_and_is_cut(tmp_path: Path) -> None:
    path, disk = tmp_path / "day=1" / "a", LocalDisk()
    assert disk.size(path) == 0
    disk.cut(path, 1)
    disk.append(path, b"one")
    disk.append(path, b"two")
    disk.cut(path, 4)
    assert (disk.read(path), disk.size(path)) == (b"onet", 4)
    disk.remove(path)
    disk.remove(path)
    assert disk.files(tmp_path, "day=*/*") == []


def test_a_lock_whose_file_goes_meanwhile_is_not_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, first, second = tmp_path / "a.lock", LocalDisk(), LocalDisk()
    assert first.lock(path)
    flock = fcntl.flock

    def late(file: Any, how: int) -> None:
        first.unlock(path)
        flock(file, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", late)
        assert not second.lock(path)
    assert second.lock(path)
    assert first.locked(path)
    second.unlock(path)


@pytest.mark.parametrize("pattern", ["*", "*/*"])
def test_a_folder_that_may_not_be_read_is_not_taken_for_an_empty_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    folder, disk = tmp_path / "usage", LocalDisk()
    disk.append(folder / "day=1" / "a", b"one")
    (folder / "prices.json").touch()
    assert len(disk.files(folder, pattern)) == {"*": 2, "*/*": 1}[pattern]
    closed = {"*": folder, "*/*": folder / "day=1"}[pattern]
    scandir, listdir = os.scandir, os.listdir

    def refusing(opens: Callable[[Any], Any]) -> Callable[[Any], Any]:
        def open_folder(path: Any) -> Any:
            if Path(path) == closed:
                raise PermissionError(13, "Permission denied", str(path))
            return opens(path)

        return open_folder

    monkeypatch.setattr(os, "scandir", refusing(scandir))
    monkeypatch.setattr(os, "listdir", refusing(listdir))
    with pytest.raises(PermissionError):
        disk.files(folder, pattern)
