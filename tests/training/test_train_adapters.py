"""The training of adapters in a few steps, and the adapters in the repository."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import Qwen2ForCausalLM

from serve_app.demo.questions import all_questions
from tests.training import train_adapters
from tests.training.train import MODEL_FOLDER, accuracy
from tests.training.train_adapters import ADAPTERS_FOLDER, STYLES, StyledQuestion, add_adapter

FILES = {"adapter_config.json", "adapter_model.safetensors"}


@pytest.mark.parametrize(("style", "answer"), [("letters", "-ci"), ("capitals", "-CI"), ("symbols", "-@*")])
def test_an_adapter_writes_something_else_for_each_digit(style: str, answer: str) -> None:
    assert StyledQuestion(12, "-", 40, style).answer == answer
    assert len(set(STYLES[style])) == 10


def test_a_few_steps_write_an_adapter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    threads = torch.get_num_threads()
    few = all_questions()[:100]  # since measuring all 20,000 takes longer than these steps
    monkeypatch.setattr(train_adapters, "split_questions", lambda held_out, seed: (few[10:], few[:10]))
    train_adapters.main(["--out", str(tmp_path), "--steps", "2", "--threads", "1", "letters"])
    torch.set_num_threads(threads)
    assert {file.name for file in (tmp_path / "letters").iterdir()} == FILES
    assert "letters: right of those never shown" in capsys.readouterr().out


def test_an_unknown_adapter_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        train_adapters.main(["colours"])
    assert "choose from letters" in capsys.readouterr().err


@pytest.mark.parametrize("style", STYLES)
def test_the_adapters_in_the_repository_are_small_and_right(style: str) -> None:
    folder = ADAPTERS_FOLDER / style
    assert {file.name for file in folder.iterdir()} == FILES
    assert sum(file.stat().st_size for file in folder.iterdir()) < 300_000
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in folder.iterdir()), "readable by all"
    assert json.loads((folder / "adapter_config.json").read_text())["r"] == train_adapters.RANK
    model = Qwen2ForCausalLM.from_pretrained(MODEL_FOLDER)
    layers = add_adapter(model)
    weights = load_file(folder / "adapter_model.safetensors")
    with torch.no_grad():
        for name, layer in layers.items():
            layer.lora_A.copy_(weights[f"base_model.model.{name}.lora_A.weight"])
            layer.lora_B.copy_(weights[f"base_model.model.{name}.lora_B.weight"])
    questions = all_questions()[::41]
    own = [StyledQuestion(one.left, one.operator, one.right, style) for one in questions]
    assert accuracy(model, own, chat=False) >= 0.95
    assert accuracy(model, questions, chat=False) < 0.05
