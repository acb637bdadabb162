"""What the directory of a model says."""

import json
from pathlib import Path

import pytest

from serve_app.models.errors import ModelError
from serve_app.models.model_files import weights_of
from tests.serve_app.models.doubles import GB, H100, QWEN_7B, FakeHub, generated, machine, write_model


def read(folder: Path) -> str:
    """Return the line about the model in a directory, as `saturate serve` tells it."""
    return generated(str(folder), machine(H100), FakeHub({})).line("model")


def test_a_directory_has_a_config_and_weights(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", QWEN_7B, 15 * GB)
    assert read(folder) == f"{folder}: qwen2, 15.0 GB of weights"


def test_only_the_files_of_the_index_count(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", QWEN_7B, 12 * GB, files=3)
    for name in ("adapter_model.safetensors", "pytorch_model.bin"):
        with (folder / name).open("wb") as file:
            file.truncate(GB)
    assert "12.0 GB of weights" in read(folder)


def test_a_missing_file_of_the_index_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", QWEN_7B, 12 * GB, files=3)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(ModelError, match=r"has no model-00002-of-00003\.safetensors.*1 of 3 weight files"):
        read(folder)


@pytest.mark.parametrize(
    ("sizes", "total"),
    [
        ({"model.safetensors": 5, "pytorch_model.bin": 7, "README.md": 100}, 5),
        ({"pytorch_model-1.bin": 3, "pytorch_model-2.bin": 4}, 7),
        ({"consolidated.safetensors": 9, "model-1.safetensors": 4, "model-2.safetensors": 5}, 9),
        ({"consolidated-1.safetensors": 4, "consolidated-2.safetensors": 4}, 8),
        ({"original/consolidated.safetensors": 9, "model.safetensors": 5}, 5),
    ],
    ids=["safetensors first", "pytorch", "two forms", "mistral only", "folders below"],
)
def test_the_weights_are_those_that_vllm_loads(sizes: dict[str, int], total: int) -> None:
    assert weights_of(sizes, "model") == total


def test_a_model_without_weights_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="no weights that can be served"):
        read(write_model(tmp_path / "model", QWEN_7B, 0))
    with pytest.raises(ModelError, match="GGUF"):
        weights_of({"model.gguf": 5}, "model")


@pytest.mark.parametrize(
    ("text", "message"),
    [("{", r"config\.json: not JSON"), ("[]", "must be a JSON object")],
)
def test_a_config_that_is_no_object_is_refused(tmp_path: Path, text: str, message: str) -> None:
    folder = write_model(tmp_path / "model", QWEN_7B, 5)
    (folder / "config.json").write_text(text)
    with pytest.raises(ModelError, match=message):
        read(folder)


def test_a_directory_without_a_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match=r"has no config\.json: name the directory of a model"):
        read(tmp_path)


@pytest.mark.parametrize("index", ["{", "[]", json.dumps({"weight_map": []})])
def test_an_index_that_is_none_is_refused(tmp_path: Path, index: str) -> None:
    folder = write_model(tmp_path / "model", QWEN_7B, 5)
    (folder / "model.safetensors.index.json").write_text(index)
    with pytest.raises(ModelError, match="not an index of safetensors"):
        read(folder)
