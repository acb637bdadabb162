"""Prompts from rows."""

import json
import re
from datetime import datetime

import numpy as np
import pytest

from serve_app.api.protocol import JSON
from serve_app.dataset import Prompter, RowError
from serve_app.rows.errors import RunError

ROW = {"prompt": "hi", "name": "Ada", "n": 2, "a b": "c", "messages": [{"role": "user", "content": "x"}]}


def test_a_column() -> None:
    assert Prompter().prompt(ROW) == "hi"
    assert Prompter(column="name").prompt(ROW) == "Ada"
    assert not Prompter().chat


def test_a_template_over_the_columns() -> None:
    prompter = Prompter(template="{{ name }} {{ n + 1 }} {{ row['a b'] }}\n")
    assert prompter.prompt(ROW) == "Ada 3 c\n"


def test_chats() -> None:
    user = {"role": "user", "content": "hi"}
    assert Prompter(chat=True).prompt(ROW) == [user]
    assert Prompter(system="be kind").prompt(ROW) == [{"role": "system", "content": "be kind"}, user]
    assert Prompter(messages_column="messages").prompt(ROW) == ROW["messages"]
    assert all(p.chat for p in (Prompter(chat=True), Prompter(system=""), Prompter(messages_column="m")))


@pytest.mark.parametrize(
    ("prompter", "type", "message"),
    [
        (Prompter(column="x"), "missing_column", "no column 'x'; there are: prompt, name, n, a b, messages"),
        (Prompter(column="n"), "invalid_row", "n: must be text, not int"),
        (Prompter(template="{{ missing }}"), "template_error", "'missing' is undefined"),
        (Prompter(template="{{ 1 / (n - 2) }}"), "template_error", "division by zero"),
        (Prompter(template="{{ n.__class__.__mro__ }}"), "template_error", "unsafe"),
        (Prompter(messages_column="name"), "invalid_row", "name: must be a list of messages"),
        (
            Prompter(messages_column="shared"),
            "invalid_row",
            "shared[1].role: missing; its fields: from, value",
        ),
    ],
)
def test_an_error_of_a_row_has_a_type_and_a_message(prompter: Prompter, type: str, message: str) -> None:
    shared = [{"role": "user", "content": "x"}, {"from": "gpt", "value": "x"}]
    with pytest.raises(RowError, match=re.escape(message)) as caught:
        prompter.prompt(ROW if "shared" not in message else {"shared": shared})
    assert caught.value.type == type


@pytest.mark.parametrize("value", [float("nan"), float("inf"), datetime(2026, 1, 1), b"x", {1: "x"}])
def test_a_chat_that_is_no_json_fails_its_row(value: object) -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": value}]}]
    with pytest.raises(RowError, match="chat: has values that JSON doesn't have") as caught:
        Prompter(messages_column="chat").prompt({"chat": messages})
    assert caught.value.type == "invalid_row"


def test_a_chat_of_arrow_or_numpy_keeps_its_fields() -> None:
    chat = [
        {"role": "user", "name": "ada", "content": [{"type": "text", "text": "hi"}]},
        {"role": "assistant", "content": "yes"},
    ]
    # Arrow gives each message, and each part, the fields of all.
    parts = [{"type": "text", "text": "hi", "image_url": None}]
    arrow: list[JSON] = [
        {"role": "user", "name": "ada", "content": parts, "tool_calls": None},
        {"role": "assistant", "name": None, "content": "yes", "tool_calls": None},
    ]
    numpy = np.array([arrow[0] | {"content": np.array(parts, dtype=object)}, arrow[1]], dtype=object)
    prompter = Prompter(messages_column="chat")
    assert [prompter.prompt({"chat": value}) for value in (arrow, numpy, json.dumps(arrow))] == [chat] * 3


def test_an_invalid_template_or_contradicting_arguments_are_errors() -> None:
    with pytest.raises(RunError, match="--template, line 1"):
        Prompter(template="{{ name")
    with pytest.raises(RunError, match="leave --template and --system out"):
        Prompter(messages_column="m", system="x")


def test_a_chat_as_json_text() -> None:
    prompter = Prompter(messages_column="messages")
    chat = [{"role": "user", "content": "a"}]
    assert prompter.prompt({"messages": json.dumps(chat)}) == chat
    for text in ("no json", '"a"', "[1]", "{}"):
        with pytest.raises(RowError, match="messages: must be a list of messages"):
            prompter.prompt({"messages": text})


def test_bytes_that_are_not_text_fail_their_row() -> None:
    with pytest.raises(RowError, match="prompt: must be text, not bytes that are not UTF-8"):
        Prompter().prompt({"prompt": b"\xff"})
    with pytest.raises(RowError, match="the template: a value is not UTF-8"):
        Prompter(template="{{ prompt }}").prompt({"prompt": b"\xff"})
