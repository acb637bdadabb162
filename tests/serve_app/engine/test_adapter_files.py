"""Adapters from each kind of source, and their fit."""

from pathlib import Path

import numpy as np
import pytest
from huggingface_hub import constants
from safetensors.numpy import save_file

from serve_app.engine import adapter_files
from serve_app.engine.adapter_files import AdapterError, check, fetch, layer_shapes
from serve_app.settings.models import LLMSettings
from serve_app.settings.sources import DEMO_MODEL
from tests.serve_app.engine.adapters import LAYER, SHAPES, write_adapter
from tests.serve_app.models.hub_server import running_hub, without_account


def test_a_copy_outlives_its_source(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    adapter = fetch(str(source), tmp_path / "copy")
    for file in source.iterdir():
        file.unlink()
    assert adapter.rank == 4
    check(adapter, 8, SHAPES)


def test_a_url_is_read_through_fsspec(tmp_path: Path) -> None:
    import fsspec

    source = write_adapter(tmp_path / "source")
    memory = fsspec.filesystem("memory")
    memory.put(f"{source}/", f"{tmp_path}/bucket/words/", recursive=True)
    adapter = fetch(f"memory://{tmp_path}/bucket/words", tmp_path / "copy")
    check(adapter, 8, SHAPES)
    with pytest.raises(AdapterError, match=r"has no file adapter_config\.json"):
        fetch(f"memory://{tmp_path}/bucket/none", tmp_path / "none")


def test_an_adapter_of_the_hub_is_downloaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        check(fetch("org/folder", tmp_path / "copy"), 8, SHAPES)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    # It is in the client's cache now.
    check(fetch("org/folder", tmp_path / "again"), 8, SHAPES)


@pytest.mark.parametrize(
    ("id", "reason"),
    [
        ("org/none", r"can't be read: the Hugging Face hub has no model org/none, .*HF_TOKEN"),
        ("org/gated", r"can't be read: org/gated is gated: accept its terms"),
        ("org/folder", r"can't be read: org/folder has no adapter_model\.safetensors, so it is no adapter"),
        ("org/forbidden", r"can't be read: org/forbidden: the Hugging Face hub answers 403"),
        ("org/--bad", r"can't be read: 'org/--bad' is not a Hugging Face id"),
    ],
)
def test_an_adapter_that_the_hub_does_not_give_is_an_error_of_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, id: str, reason: str
) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_model.safetensors").unlink()
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        with pytest.raises(AdapterError, match=reason) as caught:
            fetch(id, tmp_path / "copy")
    assert "\n" not in str(caught.value)


def test_a_file_of_the_hub_that_is_too_large_is_not_downloaded(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    source = write_adapter(tmp_path / "source")
    most = (source / "adapter_model.safetensors").stat().st_size - 1
    monkeypatch.setattr(adapter_files, "MAX_BYTES", most)
    with running_hub(source) as url:
        without_account(monkeypatch, tmp_path, url)
        with pytest.raises(AdapterError, match=f"and {most} are the most"):
            fetch("org/folder", tmp_path / "copy")
    assert not list((tmp_path / "cache").rglob("*.safetensors"))


def test_a_source_that_is_missing_or_something_else_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(AdapterError, match=r"has no file adapter_config\.json"):
        fetch(str(tmp_path / "missing"), tmp_path / "1")
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text("{}")
    with pytest.raises(AdapterError, match="PEFT's format"):
        fetch(str(source), tmp_path / "2")
    with pytest.raises(AdapterError, match="can't be read"):
        fetch("nothing://bucket/words", tmp_path / "3")


@pytest.mark.parametrize("config", ['{"r": 1e999}', "[" * 100_000], ids=["endless rank", "nested"])
def test_a_config_of_odd_values_is_an_error(tmp_path: Path, config: str) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_config.json").write_text(config)
    with pytest.raises(AdapterError, match="PEFT's format"):
        fetch(str(source), tmp_path / "copy")


def test_a_matrix_without_rows_is_an_error(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    name = f"base_model.model.{LAYER}.lora_A.weight"
    save_file({name: np.array(1.0, np.float32)}, source / "adapter_model.safetensors")
    with pytest.raises(AdapterError, match=f"{name} is no matrix"):
        check(fetch(str(source), tmp_path / "copy"), 8, SHAPES)


def test_a_copy_that_can_not_be_written_is_an_error(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    (tmp_path / "file").touch()
    with pytest.raises(AdapterError, match="NotADirectoryError"):
        fetch(str(source), tmp_path / "file" / "copy")


def test_an_adapter_that_does_not_fit_is_an_error_with_the_reason(tmp_path: Path) -> None:
    cases = {
        "rank": (write_adapter(tmp_path / "a", rank=16), r"rank 16, and the engine takes 8"),
        "pattern": (write_adapter(tmp_path / "b", rank_pattern={"q": 9}), "rank 9"),
        "inputs": (write_adapter(tmp_path / "c", inputs=4), "another base model.*size 4, and this one 8"),
        "outputs": (write_adapter(tmp_path / "d", outputs=12), "another base model.*size 12"),
        "layer": (write_adapter(tmp_path / "e", layer=LAYER.replace("0", "9")), "no layer model.layers.9"),
    }
    for name, (source, reason) in cases.items():
        with pytest.raises(AdapterError, match=reason):
            check(fetch(str(source), tmp_path / "copies" / name), 8, SHAPES)


def test_a_layer_that_transformers_names_otherwise_is_left_to_vllm(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source", layer="language_model.experts.0.w1")
    check(fetch(str(source), tmp_path / "copy"), 8, SHAPES)


def test_weights_that_are_cut_off_are_an_error(tmp_path: Path) -> None:
    source = write_adapter(tmp_path / "source")
    (source / "adapter_model.safetensors").write_bytes(b"\x10\0\0\0\0\0\0\0{")
    with pytest.raises(AdapterError, match="can't be read"):
        check(fetch(str(source), tmp_path / "copy"), 8, SHAPES)


def test_the_layers_of_a_base_model_are_known_without_its_weights() -> None:
    from transformers import AutoConfig

    shapes = layer_shapes(AutoConfig.from_pretrained(LLMSettings(id="demo", source=DEMO_MODEL).path))
    assert shapes is not None
    assert shapes[LAYER] == (128, 128)
    assert shapes["model.layers.3.mlp.down_proj"] == (128, 384)
    assert layer_shapes(object()) is None
