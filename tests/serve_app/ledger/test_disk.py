"""The ledger's file system."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from serve_app.ledger.disk import LocalDisk


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


def test_a_file_that_is_touched_is_younger_than_before(tmp_path: Path) -> None:
    path, disk = tmp_path / "day=1" / "a", LocalDisk()
    assert disk.modified(path) == float("inf")
    first = disk.touch(path)
    os.utime(path, (first - 60, first - 60))
    assert disk.modified(path) == first - 60
    assert disk.touch(path) >= first


@pytest.mark.parametrize("pattern", ["*", "*/*"])
def test_a_folder_that_may_not_be_read_is_not_empty(
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
