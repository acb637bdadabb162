"""The ledger's file system."""

import subprocess
import sys
from pathlib import Path

import pytest

from serve_app.usage.disk import LocalDisk

HOLDER = """
import sys
from pathlib import Path
from serve_app.usage.disk import LocalDisk
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
