"""What an argument of `saturate serve` names."""

from pathlib import Path

import pytest

from serve_app.models.errors import ModelError
from serve_app.models.source import is_config
from tests.serve_app.models.doubles import GB, H100, QWEN_7B, FakeHub, generated, machine, write_model


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a.yaml", True),
        ("folder/a.yml", True),
        ("A.YAML", True),
        ("there", True),
        ("demo", False),
        ("Qwen/Qwen2.5-7B-Instruct", False),
        ("folder", False),
        ("none", False),
    ],
)
def test_a_config_is_a_file_or_ends_like_one(
    name: str, expected: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("{}")
    (tmp_path / "folder").mkdir()
    assert is_config(name) == expected


NOTHING = FakeHub({})


def test_a_directory_is_read_before_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    folder = write_model(tmp_path / "Qwen" / "Qwen2.5", QWEN_7B, GB)
    for name in ("Qwen/Qwen2.5", "./Qwen/Qwen2.5"):
        assert generated(name, machine(H100), NOTHING).model.source == str(folder)
    assert NOTHING.asked == []


def test_an_id_is_read_from_the_hub(tmp_path: Path) -> None:
    hub = FakeHub({"org/model": write_model(tmp_path / "model", QWEN_7B, GB)})
    assert generated("org/model", machine(H100), hub, "engine.revision=v2").model.source == "org/model"
    assert hub.asked == [("org/model", "v2")]


@pytest.mark.parametrize("name", ["gpt2", "./none", "/none/none", "~no user/none", "a/b/c", "org/", ""])
def test_anything_else_is_refused(name: str) -> None:
    with pytest.raises(ModelError, match=r"neither a config .* nor a directory, nor a Hugging Face id"):
        generated(name, machine(H100), NOTHING)
    assert NOTHING.asked == []
