"""Signatures of files."""

import errno
from pathlib import Path
from typing import IO

import pytest

from serve_app.system.file_signature import file_signature


def test_a_signature_changes_with_the_file(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    missing = file_signature(path)
    path.write_text("a")
    first = file_signature(path)
    assert file_signature(path) == first
    other = tmp_path / "new.yaml"
    other.write_text("b")
    other.replace(path)
    assert len({missing, first, file_signature(path)}) == 3


def test_a_file_that_may_not_be_read_has_another_signature_once_it_may(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text("a")

    def refuse(*_: object, **__: object) -> IO[bytes]:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", refuse)
        refused = file_signature(path)
    # A change of its permissions alone leaves its content, size and time as they were.
    assert refused == errno.EACCES
    assert file_signature(path) != refused
