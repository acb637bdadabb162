"""Directories of copies, and those that killed processes left."""

from pathlib import Path

import pytest

from serve_app.engine.adapter_copies import AdapterFiles


def test_the_copies_of_a_killed_process_are_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (left := tmp_path / "saturate-adapters-99999999-x").mkdir()
    files = AdapterFiles()
    assert not left.exists()
    again = AdapterFiles()
    assert len(list(tmp_path.iterdir())) == 2
    files.close()
    again.close()
    assert list(tmp_path.iterdir()) == []
