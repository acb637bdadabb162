"""Files of a LoRA adapter: fetched into a directory of this process, and checked against the base model."""

import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from serve_app.system.hub_errors import explain

CONFIG = "adapter_config.json"
WEIGHTS = "adapter_model.safetensors"

PREFIX = "base_model.model."
"""Prefix that PEFT gives the names of the base model's layers."""

MAX_BYTES = 16 << 30
"""Most bytes of an adapter."""

Shapes = Mapping[str, tuple[int, int]]
"""Outputs and inputs of the base model's linear layers, by their names."""


class AdapterError(Exception):
    """An adapter can't be used; the message says why, to the administrator who names it."""


class Adapter(NamedTuple):
    """An adapter in a directory of this process.

    Attributes:
        path: The directory.
        rank: The largest rank of its matrices.
    """

    path: Path
    rank: int


def fetch(location: str, target: Path) -> Adapter:
    """Copy an adapter into a directory, which the source doesn't change and whose files stay.

    Args:
        location: A directory, a Hugging Face id, or a URL that fsspec knows.
        target: The directory; it is made.

    Raises:
        AdapterError: The source can't be read, or isn't an adapter.
    """
    try:
        target.mkdir(parents=True)
        if location.startswith("/"):
            _copy(Path(location), target)
        elif "://" in location:
            _download(location, target)
        else:
            _from_hub(location, target)
    except AdapterError:
        raise
    except Exception as error:
        # Each storage has errors of its own.
        raise AdapterError(f"can't be read: {type(error).__name__}: {error}") from None
    return Adapter(target, _rank(target / CONFIG))


def _rank(path: Path) -> int:
    """Return the largest rank that the configuration of an adapter names."""
    try:
        config = json.loads(path.read_text())
        return max(int(rank) for rank in (config["r"], *(config.get("rank_pattern") or {}).values()))
    except Exception as error:
        # The file may hold anything: an infinite rank, or lists that are nested too deep to be read.
        raise AdapterError(f"{CONFIG} is not that of a LoRA adapter in PEFT's format: {error!r}") from None


def _copy(source: Path, target: Path) -> None:
    for name in (CONFIG, WEIGHTS):
        if not (source / name).is_file():
            raise AdapterError(f"has no file {name}; an adapter in PEFT's format has {CONFIG} and {WEIGHTS}")
        _check_size((source / name).stat().st_size)
        shutil.copyfile(source / name, target / name)


def _download(url: str, target: Path) -> None:
    try:
        from fsspec.core import url_to_fs

        fs, root = url_to_fs(url)
    except ImportError as error:
        message = "needs fsspec and the package of its scheme: pip install 'saturate[storage]' s3fs"
        raise AdapterError(f"{message} ({error})") from None
    for name in (CONFIG, WEIGHTS):
        path = f"{root.rstrip('/')}/{name}"
        if not fs.exists(path):
            raise AdapterError(f"has no file {name}; an adapter in PEFT's format has {CONFIG} and {WEIGHTS}")
        _check_size(int(fs.size(path) or 0))
        fs.get_file(path, str(target / name))


def _from_hub(repository: str, target: Path) -> None:
    from huggingface_hub import hf_hub_download

    # Both files are of one commit.
    commit: str | None = None
    for name in (CONFIG, WEIGHTS):
        try:
            found = hf_hub_download(repository, name, revision=commit, dry_run=True)
            _check_size(found.file_size or 0)
            path = hf_hub_download(repository, name, revision=commit)
            commit = found.commit_hash
        except AdapterError:
            raise
        except Exception as error:  # The client's versions raise errors of different HTTP libraries.
            failure = explain(error, repository, name, kind="adapter", revision=commit)
            raise AdapterError(f"can't be read: {failure.message}") from None
        shutil.copyfile(path, target / name)


def _check_size(size: int) -> None:
    if size > MAX_BYTES:
        raise AdapterError(f"has {size} bytes, and {MAX_BYTES} are the most")


def check(adapter: Adapter, max_rank: int, shapes: Shapes | None) -> None:
    """Check that an adapter fits the engine. vLLM takes matrices that are too small for its layers.

    Args:
        adapter: The adapter.
        max_rank: The engine's `max_lora_rank`.
        shapes: The base model's layers; None: they aren't known, and are left to vLLM.

    Raises:
        AdapterError: It doesn't fit.
    """
    if adapter.rank > max_rank:
        raise AdapterError(f"has rank {adapter.rank}, and the engine takes {max_rank} (engine.max_lora_rank)")
    found = _matrices(adapter.path / WEIGHTS)
    if not found:
        raise AdapterError(f"{WEIGHTS} has no matrices")
    if shapes is None:
        return
    kinds = set(map(_kind, shapes))
    for name, shape in found.items():
        layer, _, part = name.removesuffix(".weight").rpartition(".")
        if part not in ("lora_A", "lora_B"):
            # vLLM knows these, or refuses them.
            continue
        layer = layer.removeprefix(PREFIX)
        if layer not in shapes:
            if _kind(layer) in kinds:
                raise AdapterError(f"is for another base model: this one has no layer {layer}")
            # vLLM may have another name for it.
            continue
        if len(shape) != 2:
            raise AdapterError(f"{name} is no matrix: it has {len(shape)} dimensions")
        outputs, inputs = shapes[layer]
        size, own = (shape[-1], inputs) if part == "lora_A" else (shape[0], outputs)
        if size != own:
            raise AdapterError(f"is for another base model: {name} has size {size}, and this one {own}")
        rank = shape[0] if part == "lora_A" else shape[-1]
        if rank > adapter.rank:
            raise AdapterError(f"{name} has rank {rank}, and {CONFIG} says {adapter.rank}")


def _kind(layer: str) -> str:
    """Return the name of a layer without its number."""
    return re.sub(r"\b\d+\b", "*", layer)


def _matrices(path: Path) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the tensors in a file, by name."""
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, framework="np") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise AdapterError(f"{WEIGHTS} can't be read: {error}") from None


def layer_shapes(config: Any) -> Shapes | None:
    """Return the shapes of a base model's linear layers; None: transformers doesn't know the model.

    Args:
        config: The configuration of transformers.
    """
    import torch
    from transformers import AutoModelForCausalLM

    try:
        # Without memory for the weights.
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
        shapes = {
            name: (int(module.weight.shape[0]), int(module.weight.shape[1]))
            for name, module in model.named_modules()
            if isinstance(module, torch.nn.Linear | torch.nn.Embedding)
        }
    except Exception:
        return None
    return shapes or None
