"""The tensors of an adapter that a worker of vLLM has a use for."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file
from vllm.model_executor.models.utils import WeightsMapper

from serve_app.engine.vllm.lora_worker import LoRAWorker

PEFT = "base_model.model."


def worker(*layers: str, mapper: WeightsMapper | None = None, pooling: bool = False) -> Any:
    """Return a worker that holds some layers; those named `qkv_proj` are three in a file."""
    packed = {
        name: [name.replace("qkv", each) for each in "qkv"] for name in layers if name.endswith("qkv_proj")
    }
    manager = SimpleNamespace(
        model=SimpleNamespace(hf_to_vllm_mapper=mapper),
        modules=dict.fromkeys(layers),
        packed_modules=packed,
        is_pooling_model=pooling,
        supported_modules_to_save=set(),
    )
    found: Any = LoRAWorker()
    found.model_runner = SimpleNamespace(lora_manager=SimpleNamespace(_adapter_manager=manager))
    return found


def adapter(folder: Path, *names: str) -> str:
    save_file({name: torch.zeros(1) for name in names}, folder / "adapter_model.safetensors")
    return str(folder)


def pair(layer: str) -> list[str]:
    return [f"{PEFT}{layer}.lora_{half}.weight" for half in "AB"]


def test_layers_that_vllm_joins_are_used(tmp_path: Path) -> None:
    names = pair("model.layers.0.q_proj") + pair("model.layers.0.o_proj") + pair("model.layers.1.q_proj")
    path = adapter(tmp_path, *names)
    one = worker("model.layers.0.qkv_proj", "model.layers.0.o_proj")
    # Another worker holds this one.
    assert one.saturate_unused_tensors(path) == pair("model.layers.1.q_proj")
    assert worker("model.layers.1.qkv_proj").saturate_unused_tensors(path) == sorted(names[:4])


def test_names_that_vllm_drops_are_told(tmp_path: Path) -> None:
    right, wrong = pair("model.layers.0.o_proj"), pair("language_model.model.layers.0.o_proj")
    path = adapter(tmp_path, *right, *wrong, f"{PEFT}model.embed_tokens.base_layer.weight")
    assert worker("model.layers.0.o_proj").saturate_unused_tensors(path) == wrong
    # Here both name the same matrices, and vLLM takes those that come last.
    mapper = WeightsMapper(orig_to_new_prefix={"language_model.model.": "model."})
    assert worker("model.layers.0.o_proj", mapper=mapper).saturate_unused_tensors(path) == right


def test_a_pooling_model_has_its_layers_without_a_prefix(tmp_path: Path) -> None:
    path = adapter(tmp_path, *pair("layers.0.o_proj"))
    assert worker("model.layers.0.o_proj", pooling=True).saturate_unused_tensors(path) == []
    assert worker("model.layers.0.o_proj").saturate_unused_tensors(path) == pair("layers.0.o_proj")
