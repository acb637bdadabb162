"""Grammars in a request: JSON schemas, regular expressions and the like that constrain its answer."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

from serve_app.api.protocol import JSON

MARKS = (b"response_format", b"structured_outputs", b"tools", b'"text"', b"output_config", b"\\u")
"""Texts of which a body with a grammar holds at least one; the last one may stand for a letter of another."""


class Grammar(NamedTuple):
    """One grammar.

    Attributes:
        kind: "json", "regex", "grammar", "choice" or "structural_tag", as vLLM names them.
        text: Its text; JSON for "json", "choice" and "structural_tag".
        field: The field of the request that holds it.
    """

    kind: str
    text: str
    field: str


def grammars_of(body: bytes) -> list[Grammar]:
    """Return the grammars in the body of a request of OpenAI's or Anthropic's API."""
    if not any(mark in body for mark in MARKS):
        return []
    try:
        content = json.loads(body)
    except (ValueError, RecursionError):
        # vLLM refuses it, in its own words.
        return []
    return list(_find(content)) if isinstance(content, dict) else []


def _find(content: JSON) -> Iterator[Grammar]:
    for field, value in (
        ("response_format", content.get("response_format")),
        ("text.format", _get(content.get("text"), "format")),
        ("output_config.format", _get(content.get("output_config"), "format")),
    ):
        match _get(value, "type"):
            case "json_schema":
                # The older API nests the schema once more.
                schema = _get(_get(value, "json_schema"), "schema") or _get(value, "schema")
                yield from _json("json", schema, field)
            case "structural_tag":
                yield from _json("structural_tag", value, field)
    for kind in ("json", "regex", "grammar", "choice", "structural_tag"):
        field = f"structured_outputs.{kind}"
        value = _get(content.get("structured_outputs"), kind)
        if isinstance(value, str):
            yield Grammar(kind, value, field)
        else:
            yield from _json(kind, value, field)
    tools = content.get("tools")
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = _get(tool, "function") or tool
        schema = _get(function, "parameters") or _get(function, "input_schema")
        yield from _json("json", schema, f"tools[{index}]")


def _json(kind: str, value: Any, field: str) -> Iterator[Grammar]:
    if isinstance(value, dict | list) and value:
        yield Grammar(kind, json.dumps(value), field)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
