"""The files that determine a model's needs: config.json, and the sizes of the weights."""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from serve_app.models.errors import ModelError

CONFIG, INDEX = "config.json", "model.safetensors.index.json"


@dataclass(frozen=True)
class ModelFiles:
    """Facts about a model that are known before its weights are loaded.

    Attributes:
        source: The Hugging Face id or the directory.
        config: The content of config.json.
        weight_bytes: Bytes of the weight files.
        download: Whether the first start downloads the weights from the hub.
    """

    source: str
    config: Mapping[str, Any]
    weight_bytes: int
    download: bool = False


def read_folder(folder: Path, source: str | None = None) -> ModelFiles:
    """Return the facts about the model in a directory.

    Args:
        folder: The directory.
        source: Name of the model for vLLM; default: the absolute path.

    Raises:
        ModelError: The directory has no complete model.
    """
    place = source or str(folder.resolve())
    if not (folder / CONFIG).is_file():
        raise ModelError(
            f"{folder} has no {CONFIG}: name the directory of a model in Hugging Face's format, with "
            "config.json, the tokenizer and *.safetensors"
        )
    sizes = {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}
    index = _index(folder / INDEX)
    if missing := sorted(index - set(sizes)):
        raise ModelError(
            f"{folder} has no {missing[0]}, which {INDEX} names; {len(missing)} of {len(index)} weight files "
            "are missing"
        )
    named = {name: sizes[name] for name in index} or sizes
    return ModelFiles(place, read_config(folder / CONFIG), weights_of(named, place))


def _index(path: Path) -> set[str]:
    """Return the weight files that an index lists; empty without an index."""
    if not path.is_file():
        return set()
    try:
        return set(json.loads(path.read_text())["weight_map"].values())
    except (ValueError, LookupError, TypeError, AttributeError):
        raise ModelError(f"{path}: not an index of safetensors") from None


def read_config(path: Path) -> Mapping[str, Any]:
    """Return the content of a config.json.

    Raises:
        ModelError: The content is not a JSON object.
    """
    try:
        content = json.loads(path.read_text())
    except ValueError as error:
        raise ModelError(f"{path}: not JSON: {error}") from None
    if not isinstance(content, dict):
        raise ModelError(f"{path}: must be a JSON object")
    return content


def weights_of(sizes: Mapping[str, int], source: str) -> int:
    """Return the bytes of the weights that vLLM loads: safetensors files, or else PyTorch files.

    Args:
        sizes: Bytes of the files, by their paths in the model's directory; subdirectories are ignored.
        source: The model, for the message.

    Raises:
        ModelError: There are no weights.
    """
    for suffix in (".safetensors", ".bin", ".pt"):
        found = {name: size for name, size in sizes.items() if name.endswith(suffix) and "/" not in name}
        # Mistral publishes the same weights in two formats; vLLM loads one format.
        shards = {name: size for name, size in found.items() if not name.startswith("consolidated")}
        if total := sum((shards or found).values()):
            return total
    raise ModelError(
        f"{source} has no weights that can be served: neither *.safetensors nor *.bin; for a GGUF model "
        "write a config (the page Configs)"
    )
