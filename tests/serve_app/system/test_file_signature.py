"""Signatures of files."""

from pathlib import Path

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
