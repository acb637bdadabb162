"""Grammars are found wherever a request can hold them."""

import json
from typing import Any

import pytest

from serve_app.engine.grammars import Grammar, grammars_of

SCHEMA = {"type": "object", "properties": {"a": {"type": "string"}}}
TEXT = json.dumps(SCHEMA)
TOOL = Grammar("json", TEXT, "tools[0]", compiles=False)
TAG = {"type": "structural_tag", "structures": [], "triggers": []}


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (
            {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
            Grammar("json", TEXT, "response_format"),
        ),
        (
            {"text": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Grammar("json", TEXT, "text.format"),
        ),
        (
            {"output_config": {"format": {"type": "json_schema", "schema": SCHEMA}}},
            Grammar("json", TEXT, "output_config.format"),
        ),
        ({"response_format": TAG}, Grammar("structural_tag", json.dumps(TAG), "response_format")),
        ({"structured_outputs": {"json": SCHEMA}}, Grammar("json", TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"json": TEXT}}, Grammar("json", TEXT, "structured_outputs.json")),
        ({"structured_outputs": {"regex": "a+"}}, Grammar("regex", "a+", "structured_outputs.regex")),
        (
            {"structured_outputs": {"choice": ["a", "b"]}},
            Grammar("choice", '["a", "b"]', "structured_outputs.choice"),
        ),
        (
            {"tools": [{"type": "function", "function": {"parameters": SCHEMA}}]},
            TOOL,
        ),
        (
            {"tools": [{"type": "function", "parameters": SCHEMA}]},
            TOOL,
        ),
        (
            {"tools": [{"name": "a", "input_schema": SCHEMA}]},
            TOOL,
        ),
    ],
)
def test_a_grammar_is_found_with_its_field(body: dict[str, Any], expected: Grammar) -> None:
    text = json.dumps(body)
    assert grammars_of(text.encode()) == [expected]
    (field, *_) = body
    escaped = f"\\u{ord(field[0]):04x}{field[1:]}"
    assert grammars_of(text.replace(field, escaped, 1).encode()) == [expected]


@pytest.mark.parametrize("more", [{"tool_choice": "required"}, {"tool_choice": {"type": "function"}}, {}])
def test_tools_are_compiled_together_where_an_answer_has_to_follow_them(more: dict[str, Any]) -> None:
    function = {"name": "a", "parameters": SCHEMA, "strict": not more}
    body = {"tools": [{"type": "function", "function": function}] * 2} | more
    *_, together = grammars_of(json.dumps(body).encode())
    assert together == Grammar("json", json.dumps({"anyOf": [SCHEMA, SCHEMA]}), "tools")


@pytest.mark.parametrize(
    "body",
    [
        b"{}",
        b"[]",
        b"{",
        b'{"prompt": "tools"}',
        b'{"tools": 5, "response_format": [], "structured_outputs": "x", "text": {"format": 5}}',
        b'{"tools": [5, null, {}], "response_format": {"type": "json_object"}}',
        b'{"response_format": {"type": "json_schema", "json_schema": 5}}',
    ],
)
def test_other_bodies_have_none(body: bytes) -> None:
    assert grammars_of(body) == []


@pytest.mark.parametrize("other", ['"a\\u00e9"', "NaN", '"\\ud800"', "[1, 2]"])
def test_grammars_are_found_beside_any_other_value(other: str) -> None:
    body = f'{{"tools": [], "response_format": 1, "tools": [{{"parameters": {TEXT}}}], "x": {other}}}'
    assert grammars_of(body.encode()) == [TOOL]
