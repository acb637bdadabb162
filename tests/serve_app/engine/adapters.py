"""Adapters of a small base model, as files."""

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

LAYER = "model.layers.0.self_attn.q_proj"
SHAPES = {LAYER: (16, 8)}
"""The base model: 8 inputs, 16 outputs."""


def write_adapter(
    folder: Path, *, rank: int = 4, inputs: int = 8, outputs: int = 16, layer: str = LAYER, **config: Any
) -> Path:
    """Write an adapter in PEFT's format; return its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{layer}.lora_A.weight": np.zeros((rank, inputs), np.float32),
        f"base_model.model.{layer}.lora_B.weight": np.zeros((outputs, rank), np.float32),
    }
    save_file(tensors, folder / "adapter_model.safetensors")
    fields = {"peft_type": "LORA", "r": rank, "lora_alpha": 8, "target_modules": ["q_proj"]} | config
    (folder / "adapter_config.json").write_text(json.dumps(fields))
    return folder
