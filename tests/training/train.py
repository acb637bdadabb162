"""Training of the demo model, from random weights: ``python -m tests.training.train``."""

import argparse
import math
import random
import time
from collections.abc import Sequence
from pathlib import Path

import torch
from torch.nn import functional
from transformers import Qwen2Config, Qwen2ForCausalLM

from serve_app.demo.questions import Question, split_questions
from serve_app.settings.sources import DEMO_FOLDER
from tests.benchmarks import command

from .corpus import IGNORED, packed_rows, plain_document, plain_rows
from .tokenizer import END, TOKEN_ID, VOCABULARY_SIZE, build_tokenizer

MODEL_FOLDER = DEMO_FOLDER / "model"
MAX_TOKENS = 8192
HELD_OUT = 0.05
"""Share of all questions that are held out of training."""

PLAIN_SHARE = 1 / 3
"""Share of steps, from the first on, that train on single questions: sums are learnt soonest this way."""
PLAIN_DOCUMENTS = 64
PACKED_TOKENS = 2048
# Later steps mix row lengths (tokens: weight): short rows keep the sums trained, long ones teach the model
# to disregard the text before the question. Length 0 stands for single questions.
ROW_LENGTHS = {0: 0.3, 64: 0.3, 256: 0.25, 1024: 0.1, 2048: 0.05}

DESCRIPTION = """\
Train the demo model, a Qwen2 of 0.9 million parameters that answers "What is 47+28?" with "75", and write
all that vLLM and transformers need to load it. Takes about 13 minutes on two CPU cores, longer where others
use them too; needs no GPU and no download.

Every 100 steps a line shows the loss (in nats per token) and the share of held-out questions that greedy
decoding answers right. The loss falls slowly to about 0.8 and fast from there on, once the model has learnt
to add. After a third of the steps it jumps up, when chats, other text and JSON come in.
"""

EXAMPLES = """\
examples:
  python -m tests.training.train                           the model in the repository, anew
  python -m tests.training.train --steps 200 --out /tmp/m  a bad model that loads, in about a minute
"""


def training_parser(
    module: str, description: str, *, out: Path, steps: int, examples: str = ""
) -> argparse.ArgumentParser:
    """Return the parser of a training, with the options `out`, `steps`, `seed` and `threads`.

    Args:
        module: The module that is run, as `python -m` takes it.
        description: What the training does and how long it takes; printed line for line.
        out: The default output folder.
        steps: The default number of steps.
        examples: Text below the options.
    """
    parser = command.parser(module, description, examples)
    parser.add_argument("--out", type=Path, default=out, help="folder to write")
    parser.add_argument("--steps", type=int, default=steps, help="how long to train")
    parser.add_argument("--seed", type=int, default=0, help="chooses first weights, order, and the unseen")
    parser.add_argument("--threads", type=int, default=2, help="CPU cores to use")
    return parser


def new_model() -> Qwen2ForCausalLM:
    """Return an untrained model, 3.6 MB in float32."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=VOCABULARY_SIZE,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,  # heads of 32, the narrowest that vLLM's attention computes on CPUs
            num_key_value_heads=4,
            max_position_embeddings=MAX_TOKENS,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
            tie_word_embeddings=True,
            initializer_range=0.05,
            bos_token_id=None,
            eos_token_id=TOKEN_ID[END],
            pad_token_id=TOKEN_ID[END],
            dtype="float32",
        )
    )


def predict(
    model: Qwen2ForCausalLM, tokens: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the predicted logits and the right tokens, wherever the next token has a label."""
    hidden = model.model(input_ids=tokens[:, :-1], use_cache=False).last_hidden_state
    learnt = labels[:, 1:] != IGNORED
    return model.lm_head(hidden[learnt]), labels[:, 1:][learnt]


@torch.inference_mode()
def accuracy(model: Qwen2ForCausalLM, questions: Sequence[Question], chat: bool) -> float:
    """Return the share of questions, 0 to 1, that greedy decoding answers with the right text and its end.

    Nothing is generated: greedy decoding writes an answer exactly if each of its tokens is the likeliest
    after those before it, so one forward pass over the whole document is enough.
    """
    right = 0
    for start in range(0, len(questions), 500):
        documents = [plain_document(question, chat) for question in questions[start : start + 500]]
        tokens, labels = plain_rows(documents)
        logits, wanted = predict(model, tokens, labels)
        hits = torch.ones_like(labels[:, 1:], dtype=torch.bool)
        hits[labels[:, 1:] != IGNORED] = logits.argmax(-1) == wanted
        right += int(hits.all(-1).sum())
    return right / len(questions)


def learning_rate(step: int, steps: int, highest: float) -> float:
    """Return the learning rate of a step, from 0: a short rise to `highest`, then a cosine down to 0."""
    rise = min(100, max(1, steps // 10))
    if step < rise:
        return highest * (step + 1) / rise
    return highest * (0.5 + 0.5 * math.cos(math.pi * (step - rise) / (steps - rise)))


def draw(rng: random.Random, questions: Sequence[Question], plain: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Draw the tokens and labels of one step: `plain` rows, or rows of a length drawn at random."""
    length = 0 if plain else rng.choices(list(ROW_LENGTHS), list(ROW_LENGTHS.values()))[0]
    if length:
        return packed_rows(rng, questions, PACKED_TOKENS // length, length)
    return plain_rows(
        [plain_document(rng.choice(questions), chat=rng.random() < 0.5) for _ in range(PLAIN_DOCUMENTS)]
    )


def train(
    model: Qwen2ForCausalLM,
    learn: Sequence[Question],
    keep: Sequence[Question],
    steps: int,
    seed: int,
    highest_rate: float = 6e-3,
) -> None:
    """Train in place on the questions of `learn`; print the accuracy on those of `keep` every 100 steps."""
    rng = random.Random(seed)
    # Muon needs fewer steps than AdamW for the layers' matrices; it is not made for the other weights.
    matrices = [weight for weight in model.model.layers.parameters() if weight.ndim == 2]
    others = [weight for weight in model.parameters() if all(weight is not matrix for matrix in matrices)]
    optimizers: list[torch.optim.Optimizer] = [
        torch.optim.Muon(matrices, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(others, weight_decay=0.0, betas=(0.9, 0.98), fused=True),
    ]
    started = time.monotonic()
    losses: list[float] = []
    for step in range(steps):
        tokens, labels = draw(rng, learn, plain=step < PLAIN_SHARE * steps)
        loss = functional.cross_entropy(*predict(model, tokens, labels))
        model.zero_grad()
        torch.autograd.backward(loss)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, highest_rate)
            optimizer.step()
        losses.append(loss.item())
        done = step + 1
        if done % 100 == 0 or done == steps:
            spent = time.monotonic() - started
            raw, chat = (accuracy(model, keep, chat) for chat in (False, True))
            print(
                f"step {done}/{steps}  loss {sum(losses) / len(losses):.4f}  unseen right: {raw:.1%} raw, "
                f"{chat:.1%} chat  {spent:.0f} s gone, {spent / done * (steps - done):.0f} s to go",
                flush=True,
            )
            losses.clear()


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, measure and write the model."""
    parser = training_parser(
        "tests.training.train", DESCRIPTION, out=MODEL_FOLDER, steps=3600, examples=EXAMPLES
    )
    options = parser.parse_args(arguments)

    started = time.monotonic()
    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    learn, keep = split_questions(HELD_OUT, options.seed)
    model = new_model()
    print(
        f"{model.num_parameters():,} parameters, {len(learn):,} questions to learn, {len(keep):,} never shown"
    )
    train(model, learn, keep, options.steps, options.seed)

    for name, questions in (("all questions", learn + keep), ("those never shown", keep)):
        raw, chat = (accuracy(model, questions, chat) for chat in (False, True))
        print(f"right of {name}: {raw:.2%} raw, {chat:.2%} chat")
    model.save_pretrained(options.out)
    (options.out / "model.safetensors").chmod(0o644)  # safetensors lets only the owner read what it writes
    build_tokenizer(MAX_TOKENS).save_pretrained(options.out)
    size = sum(file.stat().st_size for file in options.out.iterdir())
    print(f"{size:,} bytes in {options.out} after {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
