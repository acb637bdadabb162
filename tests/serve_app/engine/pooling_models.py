"""Pooling models without a download: the demo model's weights, with a head of random ones for classes."""

import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from serve_app.settings.sources import DEMO_FOLDER


def make_classifier(folder: Path, labels: int) -> Path:
    """Make a model that classifies, out of the demo model; return its directory.

    Args:
        folder: Where its directory is made.
        labels: Its classes, `class 0` and so on; one: it scores pairs.
    """
    path = folder / f"classifier-{labels}"
    shutil.copytree(DEMO_FOLDER / "model", path)
    config = json.loads((path / "config.json").read_text())
    names = {str(index): f"class {index}" for index in range(labels)}
    config |= {"architectures": ["Qwen2ForSequenceClassification"], "num_labels": labels, "id2label": names}
    config["label2id"] = {name: int(index) for index, name in names.items()}
    (path / "config.json").write_text(json.dumps(config))
    weights = load_file(path / "model.safetensors")
    draws = torch.Generator().manual_seed(1)
    weights["score.weight"] = torch.randn(labels, config["hidden_size"], generator=draws) / 4
    save_file(weights, path / "model.safetensors", metadata={"format": "pt"})
    return path
