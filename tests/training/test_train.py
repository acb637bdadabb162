"""The training script in a few steps, and the model in the repository."""

import random
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from serve_app.demo.questions import all_questions
from tests.training import train
from tests.training.tokenizer import END, TOKEN_ID

MODEL_FILES = {
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
}


@pytest.fixture(autouse=True)
def _threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def test_a_few_steps_write_a_model_that_loads(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    few = all_questions()[:100]  # since measuring all 20,000 takes longer than these steps
    monkeypatch.setattr(train, "split_questions", lambda held_out, seed: (few[10:], few[:10]))
    train.main(["--out", str(tmp_path), "--steps", "2", "--threads", "1"])
    assert {file.name for file in tmp_path.iterdir()} == MODEL_FILES
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    prompt = AutoTokenizer.from_pretrained(tmp_path)("What is 1+1?", return_tensors="pt")
    assert model.generate(**prompt, max_new_tokens=3).shape[-1] > prompt["input_ids"].shape[-1]
    assert "step 2/2" in capsys.readouterr().out


def test_help_says_how_long_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        train.main(["--help"])
    assert "minutes" in capsys.readouterr().out


def test_the_model_in_the_repository_is_small_and_complete() -> None:
    files = list(train.MODEL_FOLDER.iterdir())
    assert {file.name for file in files} == MODEL_FILES
    assert sum(file.stat().st_size for file in files) <= 4_000_000
    assert all(file.stat().st_mode & 0o044 == 0o044 for file in files), "readable by all"


def test_the_model_in_the_repository_ends_its_answers_and_reads_4096_tokens() -> None:
    model = AutoModelForCausalLM.from_pretrained(train.MODEL_FOLDER)
    assert model.dtype == torch.float32
    assert model.config.max_position_embeddings >= 4096
    generation = GenerationConfig.from_pretrained(train.MODEL_FOLDER)
    assert generation.eos_token_id == TOKEN_ID[END]
    assert not generation.do_sample


@pytest.mark.parametrize("chat", [False, True])
def test_the_model_in_the_repository_is_right(chat: bool) -> None:
    model = AutoModelForCausalLM.from_pretrained(train.MODEL_FOLDER)
    sample = random.Random(1).sample(all_questions(), 500)
    assert train.accuracy(model, sample, chat) >= 0.99
