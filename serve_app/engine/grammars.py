"""Grammars in a request: JSON schemas, regular expressions and the like that constrain its answer."""

import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import msgspec

from serve_app.api.facts import GRAMMARS
from serve_app.api.protocol import JSON

_FIELDS = msgspec.json.Decoder(dict[str, msgspec.Raw])


class Grammar(NamedTuple):
    """One grammar.

    Attributes:
        kind: "json", "regex", "grammar", "choice" or "structural_tag", as vLLM names them.
        text: Its text; JSON for "json", "choice" and "structural_tag".
        field: The field of the request that holds it.
        compiles: vLLM compiles it; otherwise it only looks at it.
    """

    kind: str
    text: str
    field: str
    compiles: bool = True


def grammars_of(body: bytes) -> list[Grammar]:
    """Return the grammars in the body of a request of OpenAI's or Anthropic's API."""
    try:
        content = _parse(body)
    except (ValueError, RecursionError):
        # vLLM refuses it, in its own words.
        return []
    return list(_find(content)) if isinstance(content, dict) else []


def _parse(body: bytes) -> Any:
    """Parse a body; the texts and numbers of large prompts are skipped where that is possible."""
    try:
        fields = _FIELDS.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        # It has what strict JSON hasn't, such as NaN.
        return json.loads(body)
    return {name: json.loads(bytes(fields[name])) for name in GRAMMARS if name in fields}


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
    yield from _tools(content)


def _tools(content: JSON) -> Iterator[Grammar]:
    """Yield the schemas of the tools, and one of all of them where an answer has to follow it."""
    tools = content.get("tools")
    schemas = []
    strict = False
    for index, tool in enumerate(tools if isinstance(tools, list) else ()):
        function = _get(tool, "function") or tool
        schema = _get(function, "parameters") or _get(function, "input_schema")
        strict = strict or bool(_get(function, "strict"))
        for grammar in _json("json", schema, f"tools[{index}]"):
            schemas.append(schema)
            yield grammar._replace(compiles=False)
    if schemas and (strict or content.get("tool_choice") not in (None, "auto", "none")):
        yield from _json("json", {"anyOf": schemas}, "tools")


def _json(kind: str, value: Any, field: str) -> Iterator[Grammar]:
    if isinstance(value, dict | list) and value:
        yield Grammar(kind, json.dumps(value), field)


def _get(value: Any, name: str) -> Any:
    return value.get(name) if isinstance(value, dict) else None
