"""Models, with the engine arguments of every server."""

import json
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import yaml

from serve_app.simulation.options import engine_options
from serve_app.simulation.profiles import PROFILES, Profile
from tests.e2e.service import ROOT

DEMO = ROOT / "serve_app/demo/model"

FRONT = {"enable_auto_tool_choice", "tool_call_parser", "reasoning_parser", "chat_template"}
"""Options of a server, which `vllm.LLM` doesn't know."""


@dataclass(frozen=True, slots=True)
class Model:
    """A model.

    Attributes:
        about: Short description for the table.
        folder: Folder of config, tokenizer and, unless they are dummies, weights.
        engine: Options of `vllm serve`, with underscores.
        gpus: Number of GPUs.
        simulate: Profile of the simulated device; None: the model runs.
        threads: CPU threads of a step; Ray gives one to an actor of one core.
        adapters: Folders of LoRA adapters, by the name that clients put in `model`.
        lora: Options of `vllm serve` for them.
    """

    about: str
    folder: Path
    engine: Mapping[str, Any]
    gpus: int = 0
    threads: int = 1
    simulate: Profile | None = None
    adapters: Mapping[str, Path] = field(default_factory=dict)
    lora: Mapping[str, Any] = field(default_factory=dict)

    @property
    def settings(self) -> dict[str, Any]:
        """The settings of the model in a config of this project."""
        served: dict[str, Any] = {"source": str(self.folder), "engine": {**self.engine, **self.lora}}
        if self.simulate is not None:
            # The engine's other options follow from the profile.
            served |= {"engine": dict(self.lora), "simulate": self.simulate.model_dump()}
        if self.adapters:
            served["adapters"] = [{"id": name, "source": str(path)} for name, path in self.adapters.items()]
        return served

    @property
    def env(self) -> dict[str, str]:
        """Environment variables of every server with this model."""
        return {"OMP_NUM_THREADS": str(self.threads)}

    @property
    def offline(self) -> dict[str, Any]:
        """The arguments of `vllm.LLM`."""
        return {"model": str(self.folder)} | {k: v for k, v in self.engine.items() if k not in FRONT}


@dataclass(frozen=True, slots=True)
class Shape:
    """A Qwen2 of some size; its weights are dummies.

    Attributes:
        hidden: Hidden size.
        layers: Number of layers.
        heads: Query heads.
        kv_heads: Heads of keys and values.
        inner: Width of the MLP.
        vocabulary: Number of tokens. The demo tokenizer has 261; more are filled up with unused words.
        dtype: Type of the weights.
    """

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    inner: int
    vocabulary: int
    dtype: str

    @property
    def parameters(self) -> int:
        """Number of parameters, to a thousandth."""
        width = self.hidden // self.heads * self.kv_heads
        layer = 2 * self.hidden**2 + 2 * self.hidden * width + 3 * self.hidden * self.inner
        return self.layers * layer + 2 * self.hidden * self.vocabulary

    def write(self, folder: Path) -> None:
        """Write config and tokenizer into a folder."""
        folder.mkdir(exist_ok=True)
        for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
            shutil.copy(DEMO / name, folder)
        tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
        known = len(tokenizer["model"]["vocab"]) + len(tokenizer["added_tokens"])
        tokenizer["model"]["vocab"] |= {f"<{n}>": n for n in range(known, self.vocabulary)}
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        config = json.loads((DEMO / "config.json").read_text()) | {
            "hidden_size": self.hidden,
            "num_hidden_layers": self.layers,
            "layer_types": ["full_attention"] * self.layers,
            "num_attention_heads": self.heads,
            "num_key_value_heads": self.kv_heads,
            "intermediate_size": self.inner,
            "vocab_size": self.vocabulary,
            "tie_word_embeddings": False,
            "dtype": self.dtype,
        }
        (folder / "config.json").write_text(json.dumps(config))


def config(tree: Path = ROOT) -> dict[str, Any]:
    """Return configs/local.yaml of a checkout of this project."""
    content: dict[str, Any] = yaml.safe_load((tree / "configs/local.yaml").read_text())
    return content


def demo(folder: Path) -> Model:
    """Return the model of configs/local.yaml, with its engine arguments."""
    return Model(about("demo"), DEMO, config()["applications"][0]["args"]["models"][0]["engine"])


def small(folder: Path) -> Model:
    """Return a model whose step takes longer on a CPU than the Python around it."""
    engine = {
        "load_format": "dummy",
        "max_model_len": 512,
        "max_num_seqs": 32,
        "max_num_batched_tokens": 2048,
        "kv_cache_memory_bytes": 2**30,
        "enforce_eager": True,
        **_executor(),
    }
    return _dummy("75m", folder, engine)


def large(folder: Path) -> Model:
    """Return a model for a GPU."""
    engine = {
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_seqs": 256,
        "max_num_batched_tokens": 8192,
        "gpu_memory_utilization": 0.9,
    }
    return _dummy("7b", folder, engine)


def tiny(folder: Path) -> Model:
    """Return a small model like `large` for a CPU, as a check of the benchmark itself."""
    engine = {
        "load_format": "dummy",
        "max_model_len": 4096,
        "max_num_seqs": 64,
        "max_num_batched_tokens": 4096,
        "kv_cache_memory_bytes": 2**28,
        "enforce_eager": True,
        **_executor(),
    }
    return _dummy("7b-tiny", folder, engine)


def device(name: str, folder: Path) -> Model:
    """Return the demo model on a simulated device that loads at once and whose cache no load fills."""
    return simulated(PROFILES[name].model_copy(update={"kv_tokens": 6_000_000, "max_model_len": 262_144}))


def simulated(profile: Profile) -> Model:
    """Return the demo model on a simulated device that loads at once; the KV cache is that of the profile."""
    at_once = profile.model_copy(update={"load_s": 0.0})
    return Model(about(profile.name), DEMO, engine_options(at_once), simulate=at_once)


def about(name: str) -> str:
    """Return a short description of a model."""
    if name in PROFILES:
        return f"the simulated device {name}"
    if name not in SHAPES:
        return "the demo model"
    size = SHAPES[name].parameters / 1e6
    return f"a Qwen2 of {size:,.{0 if size > 10 else 1}f} million parameters with dummy weights"


def _executor() -> dict[str, Any]:
    """Return the executor setting of configs/local.yaml."""
    name = "distributed_executor_backend"
    return {name: config()["applications"][0]["args"]["models"][0]["engine"][name]}


def _dummy(name: str, folder: Path, engine: Mapping[str, Any]) -> Model:
    SHAPES[name].write(folder / name)
    return Model(about(name), folder / name, engine, gpus=int(name in GPU_MODELS))


SHAPES: Mapping[str, Shape] = {
    "75m": Shape(768, 10, 12, 12, 2240, 261, "bfloat16"),
    # The shape of Qwen2.5-7B.
    "7b": Shape(3584, 28, 28, 4, 18944, 152064, "bfloat16"),
    "7b-tiny": Shape(128, 2, 4, 2, 512, 2048, "bfloat16"),
}
"""Shapes of the models with dummy weights, by name."""

GPU_MODELS = {"7b"}
"""Models that need a GPU."""

MODELS: Mapping[str, Callable[[Path], Model]] = {
    "demo": demo,
    "75m": small,
    "7b": large,
    "7b-tiny": tiny,
    **{name: partial(device, name) for name in PROFILES},
}
"""Factories of the models, by name; each gets a folder for files."""
