"""Training of the demo model's LoRA adapters: ``python -m tests.training.train_adapters``."""

import json
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import nn
from torch.nn import functional
from transformers import Qwen2ForCausalLM

from serve_app.demo.questions import Question, split_questions
from serve_app.settings.sources import DEMO_FOLDER

from .corpus import plain_document, plain_rows
from .train import HELD_OUT, MODEL_FOLDER, accuracy, learning_rate, predict, training_parser

ADAPTERS_FOLDER = DEMO_FOLDER / "adapters"

STYLES = {"letters": "abcdefghij", "capitals": "ABCDEFGHIJ", "symbols": ")!@#$%^&*("}
"""The adapters, and what each writes for the digits from 0 to 9."""

RANK = 8
ALPHA = 16
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
DOCUMENTS = 32

DESCRIPTION = """\
Train LoRA adapters of the demo model, which give its answers another form, and write them in PEFT's file
format: "letters" answers "What is 47+28?" with "hf", "capitals" with "HF", "symbols" with "&%". Takes half a
minute for each on two CPU cores.
"""


@dataclass(frozen=True)
class StyledQuestion(Question):
    """A question whose answer has the form of an adapter."""

    style: str

    @property
    def answer(self) -> str:
        """The right answer in that form."""
        return super().answer.translate(str.maketrans("0123456789", STYLES[self.style]))


class LowRankLinear(nn.Module):
    """A linear layer that stays as it is, with a product of two small matrices added to it.

    Args:
        base: The layer.
        rank: Rank of the product.
    """

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.lora_A = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.lora_B = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """Return the output of the layer for its input."""
        added = functional.linear(functional.linear(hidden, self.lora_A), self.lora_B)
        output: torch.Tensor = self.base(hidden) + ALPHA / RANK * added
        return output


def add_adapter(model: Qwen2ForCausalLM) -> dict[str, LowRankLinear]:
    """Freeze a model and add an adapter that changes nothing yet; return its layers by their names."""
    model.requires_grad_(False)
    layers = {}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS:
            layers[name] = LowRankLinear(module, RANK)
            setattr(model.get_submodule(parent), last, layers[name])
    return layers


def train(
    model: Qwen2ForCausalLM, layers: Sequence[nn.Module], learn: Sequence[Question], steps: int, seed: int
) -> None:
    """Train the layers of an adapter in place on questions with their answers."""
    rng = random.Random(seed)
    weights = [weight for layer in layers for weight in layer.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(weights, weight_decay=0.0, betas=(0.9, 0.98), fused=True)
    for step in range(steps):
        documents = [plain_document(rng.choice(learn), chat=rng.random() < 0.5) for _ in range(DOCUMENTS)]
        tokens, labels = plain_rows(documents)
        loss = functional.cross_entropy(*predict(model, tokens, labels))
        optimizer.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(weights, 1.0)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps, 1e-2)
        optimizer.step()
        if (step + 1) % 100 == 0:
            print(f"  step {step + 1}/{steps}  loss {loss.item():.4f}", flush=True)


def save(layers: dict[str, LowRankLinear], folder: Path) -> None:
    """Write an adapter as PEFT does, in half precision."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {
        f"base_model.model.{name}.{part}.weight": getattr(layer, part).detach().half().contiguous()
        for name, layer in layers.items()
        for part in ("lora_A", "lora_B")
    }
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    (folder / "adapter_model.safetensors").chmod(0o644)  # safetensors lets only the owner read what it writes
    config = {
        "base_model_name_or_path": "saturate://demo",
        "bias": "none",
        "inference_mode": True,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "peft_type": "LORA",
        "r": RANK,
        "target_modules": list(TARGETS),
        "task_type": "CAUSAL_LM",
    }
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and write the adapters."""
    parser = training_parser("tests.training.train_adapters", DESCRIPTION, out=ADAPTERS_FOLDER, steps=600)
    parser.add_argument("styles", nargs="*", help=f"which of them (default: {' '.join(STYLES)})")
    options = parser.parse_args(arguments)
    if unknown := sorted(set(options.styles) - set(STYLES)):
        parser.error(f"there is no adapter {unknown[0]!r}; choose from {', '.join(STYLES)}")

    torch.set_num_threads(options.threads)
    for style in options.styles or STYLES:
        started = time.monotonic()
        torch.manual_seed(options.seed)
        questions = split_questions(HELD_OUT, options.seed)
        learn, keep = (
            [StyledQuestion(one.left, one.operator, one.right, style) for one in part] for part in questions
        )
        model = Qwen2ForCausalLM.from_pretrained(MODEL_FOLDER)
        layers = add_adapter(model)
        train(model, list(layers.values()), learn, options.steps, options.seed)
        raw, chat = (accuracy(model, keep, chat) for chat in (False, True))
        folder = options.out / style
        save(layers, folder)
        size = sum(file.stat().st_size for file in folder.iterdir())
        print(
            f"{style}: right of those never shown: {raw:.1%} raw, {chat:.1%} chat; {size:,} bytes in "
            f"{folder} after {time.monotonic() - started:.0f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
