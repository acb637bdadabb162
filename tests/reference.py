"""Make the generated files: ``python -m tests.reference``; with ``--check`` only say which are stale.

Settings, the schema of configs, commands, metrics, statistics and the map of the source come from the code,
the Helm chart from the manifests. The limits of the tests are lowered to what the tests are.
"""

import ast
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import click

from k8s import helm
from serve_app.api.protocol import JSON
from serve_app.auth.keys import Key
from serve_app.cli.main import COMMANDS, saturate
from serve_app.ingress.api_document import FILE
from serve_app.settings.environment import VARIABLES
from serve_app.settings.schema import Settings
from serve_app.settings.user_config import UserConfig
from serve_app.stats import ServiceHealth, ServiceStats
from serve_app.telemetry import catalogue
from tests import limits, openapi

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "serve_app/docs"
MADE = "Made from the code by `make reference`."

# Settings


def settings() -> str:
    """Return the page of the settings and of the environment."""
    definitions: dict[str, JSON] = {}
    for model in (Settings, UserConfig, Key):
        own = model.model_json_schema()
        definitions |= own.pop("$defs", {}) | {model.__name__: own}
    roots = {"Settings": "`args`", "UserConfig": "`user_config`", "Key": "An entry of the keys file"}
    order = dict.fromkeys(name for root in roots for name in _reached(root, definitions))
    head = (
        f"# Settings\n\nAll settings of a config. {MADE} [README.md](README.md) has examples,\n"
        "and `saturate schema` prints the settings as a JSON Schema.\n"
    )
    sections = (_section(roots.get(name, name), definitions[name]) for name in order)
    return "\n".join([head, *sections, _environment()])


def _reached(name: str, definitions: Mapping[str, JSON]) -> Iterator[str]:
    """Yield an object and those that it holds, each behind the first that holds it."""
    yield name
    for found in re.findall(r"#/\$defs/(\w+)", json.dumps(definitions[name])):
        if found in definitions:
            yield from _reached(found, definitions)


def _section(title: str, definition: JSON) -> str:
    about = [line.strip() for line in definition.get("description", "").splitlines()]
    lines = [f"## {title}", "", *about, ""]
    if fields := definition.get("properties"):
        required = definition.get("required", ())
        lines += ["| field | type | default | |", "|---|---|---|---|"]
        lines += [_row(field, found, field in required) for field, found in fields.items()]
        lines.append("")
    return "\n".join(lines)


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


def _environment() -> str:
    rows = (f"| `{one.name}` | `{one.value}` | {one.reason} |" for one in VARIABLES)
    return _lines(
        "## Environment variables",
        "",
        "Each process of Ray sets these variables at its start, unless the environment of the machine or the",
        "config does. Ray Serve and vLLM read them.",
        "",
        "| variable | value | |",
        "|---|---|---|",
        *rows,
    )


# Statistics, metrics


def statistics() -> str:
    """Return the page of `/stats` and `/health`."""
    parts = []
    for path, model in (("/stats", ServiceStats), ("/health", ServiceHealth)):
        own = model.model_json_schema()
        definitions = {**own.pop("$defs", {}), model.__name__: own}
        # The batcher's README has these.
        batchers = {"ContinuousStats", "BatchStats"}
        names = dict.fromkeys(name for name in _reached(model.__name__, definitions) if name not in batchers)
        titles = {model.__name__: f"`GET {path}`"}
        parts += [_section(titles.get(name, name), definitions[name]) for name in names]
    text = "\n".join(parts)
    for name in ("ContinuousStats", "BatchStats"):
        text = text.replace(f"(#{name.lower()})", "(../../../batcher/README.md#statistics)")
    return f"# `/stats` and `/health`\n\n{MADE} `serve_app.client.Client` reads both.\n\n{text}"


def metrics() -> str:
    """Return the page of the metrics."""
    return _lines(
        "# Metrics",
        "",
        f"{MADE} [Kubernetes](../../../k8s/README.md#metrics-alerts-the-dashboard) has the dashboard and "
        f"alerts.",
        "",
        catalogue.table(),
    )


# Commands


def commands() -> str:
    """Return the page of the commands."""
    parts = [f"# Commands\n\n{MADE} [Exit codes](exit-codes.md) are the same for all.\n"]
    for name in COMMANDS:
        parts += _helps(saturate, [name])
    return "\n".join(parts)


def _helps(parent: click.Group, path: list[str]) -> Iterator[str]:
    """Yield the help of a command, and of those below it."""
    context = click.Context(parent, info_name="saturate", terminal_width=100, max_content_width=100)
    own = parent.commands[path[0]].make_context(path[0], [], context, resilient_parsing=True)
    yield from _help(own, ["saturate", path[0]])


def _help(context: click.Context, path: list[str]) -> Iterator[str]:
    context.max_content_width = context.terminal_width = 100
    text = context.get_help().strip()
    yield f"## {' '.join(path)}\n\n<!-- skip: the help of the command -->\n```text\n{text}\n```\n"
    if isinstance(context.command, click.Group):
        for name, command in context.command.commands.items():
            with click.Context(command, parent=context, info_name=name) as below:
                yield from _help(below, [*path, name])


# The source

FOLDERS = {
    "batcher": "The library: both batchers, without any other package.",
    "serve_app": "What `serve run` imports, the client of a service, the schema of its statistics.",
    "serve_app/cli": "The command `saturate`, each subcommand with what it needs.",
    "serve_app/models": "`saturate serve MODEL`: devices, files, memory, the config with its comments.",
    "serve_app/tuning": "`saturate plan`, `tune` and `profile`.",
    "serve_app/dataset": "`saturate batch`: inputs, prompts, the run, outputs.",
    "serve_app/jobs": "Files and batches: uploads, plans, states, results.",
    "serve_app/rows": "The engine of rows: runs, places, tries, ways to the engines.",
    "serve_app/ingress": "The HTTP front: bodies, keys, limits, routing, relay, streams that go on.",
    "serve_app/engine": "The Engine: door, jobs, grammars, adapters, watchdog.",
    "serve_app/engine/vllm": "The only folder that imports vLLM.",
    "serve_app/quotas": "Quotas of keys and tenants.",
    "serve_app/ledger": "Who used what: rows, files, reports, prices.",
    "serve_app/turns": "Models that take turns on a device.",
    "serve_app/auth": "API keys.",
    "serve_app/telemetry": "Metrics, request log, traces.",
    "serve_app/wire": "What crosses between Ingress and Engine: requests, pieces of answers, usage.",
    "serve_app/settings": "The config: schema, messages, environment.",
    "serve_app/simulation": "Simulated devices.",
    "serve_app/api": "Requests, answers, errors, scheduling fields.",
    "serve_app/system": "Processes, signals, files, YAML.",
    "serve_app/demo": "The demo model and MiniLM.",
}
"""The folders from top to bottom: imports run downward only."""


def source_map() -> str:
    """Return the map of the source: each folder, each file, and what it is for."""
    parts = [
        f"# The source: which file does what\n\n{MADE} Imports run downward, in the order of this page.\n"
    ]
    for folder, about in FOLDERS.items():
        files = sorted(path for path in (ROOT / folder).glob("*.py") if path.name[0] != "_")
        rows = (
            f"| [`{path.name}`](../../../{path.relative_to(ROOT)}) | {_first_line(path)} |" for path in files
        )
        parts.append(_lines(f"## `{folder}/`", "", about, "", "| file | |", "|---|---|", *rows))
    return "\n".join(parts)


def _first_line(path: Path) -> str:
    text = ast.get_docstring(ast.parse(path.read_text())) or ""
    return text.partition("\n")[0].replace("|", "\\|")


def _lines(*lines: str) -> str:
    return "\n".join(lines) + "\n"


PAGES: Mapping[Path, Callable[[], str]] = {
    ROOT / "configs/reference.md": settings,
    ROOT / "k8s/chart/README.md": helm.page,
    DOCS / "reference/commands.md": commands,
    DOCS / "reference/metrics.md": metrics,
    DOCS / "reference/stats.md": statistics,
    DOCS / "explain/source-map.md": source_map,
    FILE: openapi.made,
}
"""The generated pages, and what makes each."""


def main() -> None:
    """Write the files, or check them."""
    made = {path: make() for path, make in PAGES.items()}
    if grown := limits.grown(limits.counted(), limits.recorded()):
        sys.exit("\n".join(grown))
    if "--check" in sys.argv[1:]:
        found = [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text() != text]
        sys.exit(f"stale, run `make reference`: {', '.join(found)}" if found else 0)
    for path, text in made.items():
        path.write_text(text)
    limits.record()


if __name__ == "__main__":
    main()
