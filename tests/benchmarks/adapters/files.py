"""LoRA adapters with random weights for the demo model, as files."""

import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file, save_file

from serve_app.engine.adapters import CONFIG, WEIGHTS
from serve_app.settings.sources import DEMO_FOLDER
from tests.benchmarks.serve.models import Model

TEMPLATE = DEMO_FOLDER / "adapters" / "letters"
"""An adapter of the demo model, which has the names and sizes of the matrices."""

MAX_RANK = 8
"""The rank of the adapters."""

SPREAD = 0.02
"""Standard deviation of the weights: so small that the model's answers hardly change."""


def write_adapters(folder: Path, count: int) -> dict[str, Path]:
    """Write adapters of the same size and different weights; return their folders by name."""
    template = load_file(TEMPLATE / WEIGHTS)
    found = {}
    for number in range(count):
        draw = np.random.default_rng(number)
        tensors = {
            name: (SPREAD * draw.standard_normal(tensor.shape)).astype(tensor.dtype)
            for name, tensor in template.items()
        }
        name = f"adapter-{number:02}"
        path = folder / name
        path.mkdir(parents=True, exist_ok=True)
        save_file(tensors, path / WEIGHTS, metadata={"format": "pt"})
        shutil.copy(TEMPLATE / CONFIG, path)
        found[name] = path
    return found


def with_adapters(model: Model, folders: Mapping[str, Path], slots: int) -> Model:
    """Return a model with adapters, whose options are the same for every server.

    Args:
        model: The demo model, or a simulated device.
        folders: Folders of the adapters, by name.
        slots: Adapters in one step of the engine.
    """
    options = {
        "enable_lora": True,
        "max_loras": slots,
        # All of them stay in memory: a step never waits for a file.
        "max_cpu_loras": max(len(folders), slots),
        "max_lora_rank": MAX_RANK,
    }
    return replace(model, adapters=folders, lora=options)
