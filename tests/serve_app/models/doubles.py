"""Models, machines and a hub that tests make up, and the service that is generated for them."""

import json
import re
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from serve_app.models.devices import Machine, UsableGPU
from serve_app.models.errors import ModelError
from serve_app.models.generated import Generated, generate
from serve_app.models.hub import Hub, HubAwayError
from serve_app.models.overrides import read_setting
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import Settings, parse

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


@dataclass(frozen=True)
class Model:
    """A model of the hub.

    Attributes:
        id: Its Hugging Face id.
        config: Content of config.json.
        weight_bytes: Bytes of the weights.
    """

    id: str
    config: Mapping[str, Any]
    weight_bytes: int


QWEN = Model("Qwen/Qwen2.5-7B-Instruct", QWEN_7B, QWEN_7B_BYTES)
LLAMA = Model("meta-llama/Llama-3.1-8B-Instruct", LLAMA_8B, LLAMA_8B_BYTES)
BIG_LLAMA = Model("meta-llama/Llama-3.3-70B-Instruct", LLAMA_70B, LLAMA_70B_BYTES)
HUGE_LLAMA = Model("meta-llama/Llama-3.1-405B-Instruct", LLAMA_405B, LLAMA_405B_BYTES)


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


@dataclass(frozen=True)
class Served:
    """The config that `saturate serve` makes of a model on a machine, with its summary.

    Attributes:
        text: The config.
        summary: The lines that say what was chosen.
    """

    text: str
    summary: tuple[str, ...]

    @property
    def content(self) -> Any:
        """The config."""
        return yaml.safe_load(self.text)

    @property
    def settings(self) -> Settings:
        """The settings of the service."""
        return parse(self.content["applications"][0]["args"])

    @property
    def model(self) -> LLMSettings:
        """The settings of the model."""
        (found,) = self.settings.models
        assert isinstance(found, LLMSettings)
        return found

    @property
    def engine(self) -> Mapping[str, Any]:
        """The options of the engine."""
        found: Mapping[str, Any] = self.content["applications"][0]["args"]["models"][0]["engine"]
        return found

    @property
    def deployments(self) -> Sequence[Mapping[str, Any]]:
        """The Ingress and the Engine."""
        found: Sequence[Mapping[str, Any]] = self.content["applications"][0]["deployments"]
        return found

    @property
    def parallel(self) -> int:
        """GPUs of a stage."""
        return int(self.engine.get("tensor_parallel_size", 1))

    @property
    def stages(self) -> int:
        """Stages of a replica."""
        return int(self.engine.get("pipeline_parallel_size", 1))

    @property
    def gpus(self) -> int:
        """GPUs of a replica."""
        return int(self.deployments[1]["ray_actor_options"].get("num_gpus", 0))

    @property
    def replicas(self) -> int:
        """Copies of the model."""
        return int(self.deployments[1]["num_replicas"])

    @property
    def notes(self) -> list[str]:
        """The further sentences for the user."""
        return [words for kind, words in (line.split(maxsplit=1) for line in self.summary) if kind == "note"]

    @property
    def tokens(self) -> int:
        """Tokens that fit into the KV cache of a device."""
        return self._memory[0]

    @property
    def per_token(self) -> int:
        """Bytes that a token takes in the KV cache of a device."""
        return self._memory[1]

    @property
    def _memory(self) -> tuple[int, int]:
        found = re.search(r"KV cache: ([\d,]+) tokens of ([\d,]+) bytes", self.line("memory"))
        assert found
        tokens, per_token = (int(number.replace(",", "")) for number in found.groups())
        return tokens, per_token

    def line(self, begin: str) -> str:
        """Return the words of the line of the summary that begins so."""
        (found,) = (line.partition(" ")[2] for line in self.summary if line.startswith(f"{begin} "))
        return found.strip()

    def comment(self, key: str) -> str:
        """Return the comment right above a key of the config."""
        *before, _ = re.split(rf"^ *-? *{key}:", self.text, maxsplit=1, flags=re.M)
        words: list[str] = []
        for line in reversed("".join(before).rstrip().splitlines()):
            if not line.lstrip().startswith("# "):
                break
            words.insert(0, line.lstrip(" #"))
        return " ".join(words)


def generated(name: str, on: Machine, hub: Hub, *settings: str, build: str | None = None) -> Served:
    """Return what `saturate serve NAME --set SETTING` makes on a machine.

    Args:
        name: The argument.
        on: The machine.
        hub: The hub.
        settings: The values of `--set`.
        build: The build of vLLM; None: the one for the machine.
    """
    found: Generated = generate(
        name,
        [*map(read_setting, settings)],
        words=[name, *(word for setting in settings for word in ("--set", setting))],
        machine=lambda: on,
        hub=lambda: hub,
        build=build or ("gpu" if on.gpus else "cpu"),
    )
    return Served(found.text, found.summary)


def served(model: Model, on: Machine, replicas: int | None = None, **options: Any) -> Served:
    """Return the config that `saturate serve` makes of a model on a machine, with its summary.

    Args:
        model: The model.
        on: The machine.
        replicas: Copies of the model that the user sets.
        options: Options of the engine that the user sets.
    """
    settings = [f"engine.{name}={value}" for name, value in options.items()]
    if replicas is not None:
        settings.append(f"deployment.num_replicas={replicas}")
    with tempfile.TemporaryDirectory() as folder:
        hub = FakeHub({model.id: write_model(Path(folder) / "model", model.config, model.weight_bytes)})
        return generated(model.id, on, hub, *settings)
