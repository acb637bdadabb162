"""Make the generated pages of the settings: ``python -m tests.reference``.

`configs/reference.md` has every setting with its type, default and description, and `configs/schema.json` is
what `saturate schema` prints.
"""

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.settings.environment import OF_CONTROLLER, OF_REPLICAS, SHARED
from serve_app.settings.json_schema import config_schema
from serve_app.settings.schema import Settings
from serve_app.settings.user_config import UserConfig

ROOT = Path(__file__).parents[1]
PAGE, SCHEMA = ROOT / "configs/reference.md", ROOT / "configs/schema.json"

ENVIRONMENT = """\
## Environment variables

The functions that a config names for the controller and the replicas set these variables, unless the
config or the environment of the machine does. Ray Serve and vLLM read them.

| variable | value | place | |
|---|---|---|---|
"""

HEAD = """\
# Settings

All settings of `args` and `user_config`, made from the code by `make reference`. [README.md](README.md)
explains them by examples, and `saturate schema` prints them as a JSON Schema.
"""


def page() -> str:
    """Return the reference of the settings as Markdown."""
    definitions: dict[str, JSON] = {}
    for model in (Settings, UserConfig):
        own = model.model_json_schema()
        definitions |= own.pop("$defs", {}) | {model.__name__: own}
    order = list(dict.fromkeys([*_reached("Settings", definitions), *_reached("UserConfig", definitions)]))
    parts = [HEAD, *(_section(name, definitions[name]) for name in order), _environment()]
    return "\n".join(parts)


def _environment() -> str:
    places = {one.name: (one, "controller") for one in OF_CONTROLLER}
    places |= {one.name: (one, "replicas") for one in OF_REPLICAS}
    places |= {one.name: (one, "both") for one in SHARED}
    rows = [f"| `{name}` | `{one.value}` | {place} | {one.reason} |" for name, (one, place) in places.items()]
    return ENVIRONMENT + "\n".join(rows) + "\n"


def schema() -> str:
    """Return the JSON Schema as a file."""
    return json.dumps(config_schema(), indent=1, ensure_ascii=False) + "\n"


def _reached(name: str, definitions: dict[str, JSON]) -> Iterator[str]:
    """Yield an object and those that it holds, each behind the first that holds it."""
    yield name
    for found in re.findall(r"#/\$defs/(\w+)", json.dumps(definitions[name])):
        yield from _reached(found, definitions)


def _section(name: str, definition: JSON) -> str:
    title = {"Settings": "`args`", "UserConfig": "`user_config`"}.get(name, name)
    lines = [f"## {title}", "", *_paragraphs(definition.get("description", "")), ""]
    if fields := definition.get("properties"):
        required = definition.get("required", ())
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(field, found, field in required) for field, found in fields.items()]
        lines.append("")
    return "\n".join(lines)


def _paragraphs(text: str) -> list[str]:
    return [line.strip() for line in text.splitlines()]


def _row(name: str, found: JSON, required: bool) -> str:
    default = "required" if required else _shown(found.get("default"))
    about = found.get("description", "").replace("|", "\\|")
    return f"| `{name}` | {_type(found)} | {default} | {about} |"


def _shown(value: Any) -> str:
    if value is None or value == {} or value == []:
        return ""
    if isinstance(value, dict):
        return "its defaults"
    return f"`{json.dumps(value)}`"


def _type(found: JSON) -> str:
    """Return the type of a field in words."""
    if reference := found.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#{name.lower()})"
    if "const" in found:
        return f"`{found['const']}`"
    if "enum" in found:
        return ", ".join(f"`{value}`" for value in found["enum"])
    if options := found.get("anyOf") or found.get("oneOf"):
        kinds = dict.fromkeys(_type(option) for option in options if option.get("type") != "null")
        return " or ".join(kinds)
    if found.get("type") == "array":
        return f"list of {_type(found.get('items', {}))}"
    if found.get("type") == "object":
        values = next(iter((found.get("patternProperties") or {}).values()), None)
        values = values or found.get("additionalProperties")
        return f"object of {_type(values)}" if isinstance(values, dict) and values else "object"
    words = {"integer": "integer", "number": "number", "string": "text", "boolean": "true or false"}
    kind = words.get(found.get("type", ""), "any")
    low, high = found.get("minimum", found.get("exclusiveMinimum")), found.get("maximum")
    if low is not None and high is not None:
        return f"{kind}, {low} to {high}"
    if low is not None:
        return f"{kind}, {'above' if 'exclusiveMinimum' in found else 'from'} {low}"
    return kind


def main() -> None:
    """Write the files."""
    PAGE.write_text(page())
    SCHEMA.write_text(schema())


if __name__ == "__main__":
    main()
