"""The demo's tokenizer and chat template, built from the source and loaded from the repository."""

import json
import unicodedata
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from tests.training.tokenizer import SPECIAL_TOKENS, TOKEN_ID, VOCABULARY_SIZE, build_tokenizer
from tests.training.train import MAX_TOKENS, MODEL_FOLDER

LOADED = AutoTokenizer.from_pretrained(MODEL_FOLDER)
PLAINLY_LOADED = PreTrainedTokenizerFast.from_pretrained(MODEL_FOLDER)

# Without unassigned characters: Python and the tokenizer may follow different versions of Unicode.
ANY_TEXT = st.text(st.characters(exclude_categories=("Cs", "Cn"))).filter(
    lambda text: not any(token in text for token in SPECIAL_TOKENS)
)

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}

Messages = list[dict[str, Any]]


def render(messages: Messages, **options: Any) -> str:
    text = LOADED.apply_chat_template(messages, tokenize=False, **({"add_generation_prompt": True} | options))
    assert isinstance(text, str)
    return text


def test_the_files_in_the_repository_are_what_the_source_builds(tmp_path: Path) -> None:
    build_tokenizer(MAX_TOKENS).save_pretrained(tmp_path)
    for name in ("tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / name).read_bytes() == (MODEL_FOLDER / name).read_bytes()
    assert LOADED.model_max_length == MAX_TOKENS
    assert len(LOADED) == VOCABULARY_SIZE


@given(ANY_TEXT)
@example("e\u0301 \uf900 😀")
@example("<|endoftext |><|")
def test_any_text_is_its_bytes_in_normal_form_c(text: str) -> None:
    normal = unicodedata.normalize("NFC", text)
    for tokenizer in (LOADED, PLAINLY_LOADED):
        tokens = tokenizer.encode(text)
        assert tokens == list(normal.encode())
        assert tokenizer.decode(tokens) == normal


@pytest.mark.parametrize("token", SPECIAL_TOKENS)
def test_special_tokens_are_one_token_and_vanish_on_request(token: str) -> None:
    assert LOADED.encode(f"a{token}b") == [97, TOKEN_ID[token], 98]
    assert LOADED.decode([97, TOKEN_ID[token], 98], skip_special_tokens=True) == "ab"


def test_one_message() -> None:
    messages: Messages = [{"role": "user", "content": "What is 47+28?"}]
    assert render(messages) == "<|user|>What is 47+28?<|endoftext|><|assistant|>"
    assert render(messages, add_generation_prompt=False) == "<|user|>What is 47+28?<|endoftext|>"


def test_many_turns() -> None:
    messages: Messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "What is 1+1?"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": [{"type": "text", "text": "What is "}, {"type": "text", "text": "2+2?"}]},
    ]
    assert render(messages) == (
        "<|system|>Be brief.<|endoftext|><|user|>What is 1+1?<|endoftext|><|assistant|>2<|endoftext|>"
        "<|user|>What is 2+2?<|endoftext|><|assistant|>"
    )
    assert render([{"role": "developer", "content": "Be brief."}]) == render(messages[:1])


def test_an_answer_to_go_on_with_stays_open() -> None:
    messages: Messages = [
        {"role": "user", "content": "What is 50+50?"},
        {"role": "assistant", "content": "10"},
    ]
    rendered = render(messages, add_generation_prompt=False, continue_final_message=True)
    assert rendered == "<|user|>What is 50+50?<|endoftext|><|assistant|>10"


def test_tools_calls_and_their_results() -> None:
    call = {"name": "add", "arguments": {"left": 1, "right": 2}}
    messages: Messages = [
        {"role": "user", "content": "What is 1+2?"},
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [{"id": "1", "type": "function", "function": call}],
        },
        {"role": "tool", "content": "3", "tool_call_id": "1"},
    ]
    assert render(messages, tools=[ADD]) == (
        f"<|system|>Tools:\n{json.dumps(ADD)}\n<|endoftext|><|user|>What is 1+2?<|endoftext|>"
        f"<|assistant|>{json.dumps(call)}<|endoftext|><|tool|>3<|endoftext|><|assistant|>"
    )


def test_an_unknown_role_is_refused_by_name() -> None:
    with pytest.raises(Exception, match="unknown role narrator"):
        render([{"role": "narrator", "content": "Once upon a time"}])
