"""Models, machines and a hub that tests make up."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.errors import ModelError
from serve_app.models.hub import HubAwayError
from serve_app.models.model_files import ModelFiles

MIB = 1 << 20

L4 = UsableGPU("NVIDIA L4", 22_563 * MIB, 1 * MIB, 8.9)
H100 = UsableGPU("NVIDIA H100 80GB HBM3", 81_039 * MIB, 1 * MIB, 9.0)
T4 = UsableGPU("Tesla T4", 14_923 * MIB, 1 * MIB, 7.5)

GB = 10**9


def machine(*gpus: UsableGPU, cores: int = 16, memory: int = 64 * GB, nodes: int = 1) -> Machine:
    """Return a machine with some GPUs, in a cluster of such machines."""
    return Machine(gpus, cores, memory, ({"GPU": float(len(gpus))},) * nodes)


QWEN_7B: dict[str, Any] = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "torch_dtype": "bfloat16",
    "hidden_size": 3584,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "num_hidden_layers": 28,
    "max_position_embeddings": 32_768,
    "sliding_window": 131_072,
    "use_sliding_window": False,
}
QWEN_7B_BYTES = 15_231_233_024

LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "torch_dtype": "bfloat16",
    "hidden_size": 4096,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 32,
    "max_position_embeddings": 131_072,
}
LLAMA_8B_BYTES = 16_060_556_376

LLAMA_70B = LLAMA_8B | {"hidden_size": 8192, "num_attention_heads": 64, "num_hidden_layers": 80}
LLAMA_70B_BYTES = 141_107_497_872

LLAMA_405B = LLAMA_8B | {"hidden_size": 16_384, "num_attention_heads": 128, "num_hidden_layers": 126}
LLAMA_405B_BYTES = 811_706_777_600

QWEN = ModelFiles("Qwen/Qwen2.5-7B-Instruct", QWEN_7B, QWEN_7B_BYTES)
LLAMA = ModelFiles("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B, LLAMA_8B_BYTES)
BIG_LLAMA = ModelFiles("meta-llama/Llama-3.3-70B-Instruct", LLAMA_70B, LLAMA_70B_BYTES)
HUGE_LLAMA = ModelFiles("meta-llama/Llama-3.1-405B-Instruct", LLAMA_405B, LLAMA_405B_BYTES)


def write_model(folder: Path, config: Mapping[str, Any], size: int, files: int = 1) -> Path:
    """Write the directory of a model, with weights that take no space on the disk.

    Args:
        folder: The directory, which is made.
        config: Content of config.json.
        size: Bytes of the weights.
        files: Files that share them.
    """
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = ["model.safetensors"]
    if files > 1:
        names = [f"model-{number + 1:05}-of-{files:05}.safetensors" for number in range(files)]
        index = {
            "metadata": {"total_size": size},
            "weight_map": {f"w{n}": name for n, name in enumerate(names)},
        }
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for name in names:
        with (folder / name).open("wb") as file:
            file.truncate(size // files)
    return folder


class FakeHub:
    """A hub with the models of some directories.

    Args:
        models: Directories by id.
        away: The hub can't be reached; only models of `cache` are there.
        cache: Directories of models that were downloaded before, by id.
    """

    def __init__(
        self, models: Mapping[str, Path], *, away: bool = False, cache: Mapping[str, Path] | None = None
    ) -> None:
        self.models = models
        self.away = away
        self.cache = cache or {}
        self.asked: list[tuple[str, str | None]] = []

    def sizes(self, id: str, revision: str | None) -> dict[str, int]:
        """Return the sizes of a directory's files."""
        self.asked.append((id, revision))
        return {path.name: path.stat().st_size for path in self._folder(id).iterdir()}

    def config(self, id: str, revision: str | None) -> Path:
        """Return a directory's config.json."""
        return self._folder(id) / "config.json"

    def cached(self, id: str, revision: str | None) -> Path | None:
        """Return the directory in the cache."""
        return self.cache.get(id)

    def _folder(self, id: str) -> Path:
        if self.away:
            raise HubAwayError("the hub can't be reached")
        if id not in self.models:
            raise ModelError(f"no model {id}")
        return self.models[id]
