"""Manifests: what they keep, and the differences between two."""

from pathlib import Path

import pytest

from serve_app.dataset.errors import OutputError
from serve_app.driver.manifest import VERSION, Manifest, manifest_path, read_manifest

MANIFEST = Manifest({"--model": "m", "--limit": None}, {"files": 1, "bytes": 10, "content": "a"})


def test_a_manifest_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = manifest_path(tmp_path / "out.jsonl")
    assert path.name == "out.jsonl.manifest.json"
    assert read_manifest(path) is None
    for manifest in (MANIFEST.progress(3), MANIFEST.completed({"rows": 5, "failed": 1})):
        manifest.write(path)
        assert read_manifest(path) == manifest
    assert manifest.complete
    assert manifest.rows == 5


def test_progress_and_completion_are_no_difference() -> None:
    assert MANIFEST.progress(3).differences(MANIFEST.completed({"rows": 5})) == []


def test_differences_have_both_values() -> None:
    other = Manifest({"--model": "n", "--seed": 1}, {"files": 1, "bytes": 12, "content": "b"})
    assert MANIFEST.differences(other) == [
        '--model was "m", is now "n"',
        "--seed was null, is now 1",
        "the input has changed: bytes 10 -> 12, other content",
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not a manifest"),
        ("[]", "not a manifest"),
        ("{}", "not a manifest"),
        (f'{{"version": {VERSION}, "other": 1}}', "not a manifest"),
        (f'{{"version": {VERSION + 1}}}', "written by another version"),
    ],
)
def test_another_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "manifest.json"
    path.write_text(text)
    with pytest.raises(OutputError, match=message):
        read_manifest(path)
