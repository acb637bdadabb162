"""Names of vLLM that this package uses, looked up in the sources of other releases: ``--help``.

Nothing of vLLM is imported, so a wheel for CUDA is read on a machine that has no GPU. The names are those of
serve_app/engine/vllm/seams.py. What a function does isn't seen: that is looked at by
tests/serve_app/engine/vllm/test_workarounds.py.
"""

import ast
import importlib.util
import re
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

from serve_app.engine.vllm.seams import PUBLIC, SEAMS
from tests.benchmarks import command

FUNCTION = (ast.FunctionDef, ast.AsyncFunctionDef)


class Name(NamedTuple):
    """A module of vLLM, and a name in it, with dots for an attribute; no name: the module itself."""

    module: str
    path: str

    def __str__(self) -> str:
        return ":".join(filter(None, self))


class Used(NamedTuple):
    """A name that the package uses.

    Attributes:
        homes: The name in the modules that have it, the newest first.
        use: What it is for.
        ends: Whether a version is known that needs it no more.
    """

    homes: tuple[Name, ...]
    use: str
    ends: bool = False


class Sources:
    """The Python sources of vLLM in a wheel, or in a directory; they are parsed and not imported."""

    def __init__(self, path: Path) -> None:
        if path.is_dir():
            self._files = {file.relative_to(path).as_posix() for file in (path / "vllm").rglob("*.py")}
            self._read = cache(lambda file: (path / file).read_text("utf-8"))
        else:
            wheel = zipfile.ZipFile(path)
            self._files = {file for file in wheel.namelist() if re.match(r"vllm/.*\.py$", file)}
            self._read = cache(lambda file: wheel.read(file).decode())
        if not self._files:
            raise ValueError(f"{path}: there is no package vllm in it")
        self._module = cache(lambda module: list(_flat(ast.parse(self._read(self._file(module))).body)))

    def _file(self, module: str) -> str:
        plain = module.replace(".", "/")
        return next((name for name in (f"{plain}.py", f"{plain}/__init__.py") if name in self._files), "")

    def signature(self, name: Name) -> str | None:
        """Return the arguments of a function or class, nothing for another value; None: it is gone."""
        if not name.path:
            return "" if self._file(name.module) else None
        first, _, attribute = name.path.partition(".")
        if (found := self._find(name.module, first)) is None or not attribute:
            return found and self._described(*found)
        module, node = found
        if node is None:
            return self.signature(Name(module, attribute))
        return self._attribute(module, node, attribute)

    def homes(self, name: str) -> list[str]:
        """Return the modules that define a name."""
        defined = re.compile(rf"^(class |def |async def )?{re.escape(name)}\b\s*[(:=]", re.MULTILINE)
        files = sorted(file for file in self._files if defined.search(self._read(file)))
        return [re.sub(r"(/__init__)?\.py$", "", file).replace("/", ".") for file in files]

    def _find(self, module: str, name: str, depth: int = 8) -> tuple[str, ast.stmt | None] | None:
        """Return where a name is defined, and how; None in place of how: it is a module."""
        if not depth or not self._file(module):
            return None
        if self._file(f"{module}.{name}"):
            return f"{module}.{name}", None
        for node in self._module(module):
            if name in _defined(node):
                return module, node
            if not isinstance(node, ast.ImportFrom):
                continue
            source = self._absolute(module, node)
            for alias in node.names:
                if (alias.asname or alias.name) == name:
                    # A name of another package ends the search: it is there.
                    inside = source.startswith("vllm")
                    return self._find(source, alias.name, depth - 1) if inside else (source, node)
                if alias.name == "*" and (found := self._find(source, name, depth - 1)):
                    return found
        # `vllm` imports its names when they are asked for, by a table with "LLM": ".entrypoints.llm:LLM".
        lazy = re.search(rf'"{re.escape(name)}":\s*"\.([\w.]+):(\w+)"', self._read(self._file(module)))
        return self._find(f"{module}.{lazy[1]}", lazy[2], depth - 1) if lazy else None

    def _absolute(self, module: str, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = module.split(".")
        drop = node.level - self._file(module).endswith("/__init__.py")
        return ".".join([*parts[: len(parts) - drop], *filter(None, [node.module])])

    def _described(self, module: str, node: ast.stmt | None) -> str:
        if not isinstance(node, ast.ClassDef):
            return _arguments(node)
        fields = [name for each in node.body if isinstance(each, ast.AnnAssign) for name in _defined(each)]
        return self._attribute(module, node, "__init__") or ", ".join(fields)

    def _attribute(self, module: str, node: ast.stmt | None, name: str, depth: int = 8) -> str | None:
        if not isinstance(node, ast.ClassDef) or not depth:
            return None
        for each in _flat(node.body):
            if name in _defined(each):
                return _arguments(each)
        for inner in ast.walk(node):
            if isinstance(inner, ast.Attribute) and inner.attr == name and isinstance(inner.ctx, ast.Store):
                return ""
        for base in node.bases:
            plain = base.value if isinstance(base, ast.Subscript) else base
            found = self._find(module, plain.id) if isinstance(plain, ast.Name) else None
            signature = found and self._attribute(*found, name, depth - 1)
            if signature is not None:
                return signature
        return None


def _flat(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Yield statements, those under conditions and attempts included."""
    for node in body:
        yield node
        if isinstance(node, ast.If | ast.Try | ast.With):
            inner = [node, *getattr(node, "handlers", [])]
            yield from _flat([each for part in inner for each in (*part.body, *getattr(part, "orelse", []))])


def _defined(node: ast.stmt) -> list[str]:
    """Return the names that a statement defines."""
    if isinstance(node, (ast.ClassDef, *FUNCTION)):
        return [node.name]
    if isinstance(node, ast.Import):
        return [alias.asname or alias.name for alias in node.names]
    targets = getattr(node, "targets", [getattr(node, "target", None)])
    return [each.id for each in targets if isinstance(each, ast.Name)]


def _arguments(node: ast.stmt | None) -> str:
    """Return the arguments of a function, without their types and defaults; nothing of another statement."""
    if not isinstance(node, FUNCTION):
        return ""
    given = node.args
    starred = [given.vararg, *given.kwonlyargs, given.kwarg]
    return ", ".join(each.arg for each in (*given.posonlyargs, *given.args, *starred) if each)


def used() -> Iterator[Used]:
    """Yield the names of vLLM that the package uses."""
    for module, names in PUBLIC.items():
        for name in names.split():
            yield Used((Name(module, name),), "public")
    for name, seam in SEAMS.items():
        modules = [each for each in (seam.module, seam.before) if each]
        for path in (name, *(f"{name}.{part}" for part in seam.parts.split())):
            yield Used(tuple(Name(module, path) for module in modules), seam.use, bool(seam.ends))


def differences(names: Iterable[Used], base: Sources, other: Sources) -> Iterator[tuple[bool, str]]:
    """Yield what has changed from one release to another; True: a name has moved, or is gone."""
    for name, use, ends in names:
        before, now = (
            next((found for home in name if (found := release.signature(home)) is not None), None)
            for release in (base, other)
        )
        if now is None:
            last = name[0].path.rpartition(".")[2]
            homes = [home for home in other.homes(last) if home not in {each.module for each in name}]
            yield not ends, f"{name[0]}: {f'moved to {homes[0]}' if homes else 'gone'} ({use})"
        elif before != now:
            old, new = (before or "").split(", "), now.split(", ")
            changes = [f"+{each}" for each in new if each not in old]
            changes += [f"-{each}" for each in old if each not in new]
            yield False, f"{name[0]}: {', '.join(changes) or 'another order'} ({use})"


def fetched(requirement: str, folder: str) -> Path:
    """Return the wheel of a requirement, which pip downloads."""
    command = ["-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest"]
    subprocess.run([sys.executable, *command, folder, requirement], check=True)
    return next(Path(folder).glob("*.whl"))


def main(arguments: list[str] | None = None) -> int:
    """Run the command; the status is 1 if a name has moved or is gone."""
    parser = command.parser("tests.benchmarks.vllm_names", __doc__ or "")
    parser.add_argument("releases", nargs="*", help="wheels, directories with vllm/, or vllm==0.33.0")
    parser.add_argument("--base", type=Path, help="the release to compare with (the installed one)")
    options = parser.parse_args(arguments)
    spec = importlib.util.find_spec("vllm")
    place = options.base or (Path(spec.origin).parents[1] if spec and spec.origin else None)
    if place is None:
        parser.error("no vLLM is installed; name a release to compare with by --base")
    base, names, lost = Sources(place), list(used()), 0
    print(f"{len(names)} names and parts, of {len({each.homes[0].module for each in names})} modules")
    for release in options.releases or [str(place)]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(release) if Path(release).exists() else fetched(release, folder)
            found = list(differences(names, base, Sources(path)))
        lost += (gone := sum(bad for bad, _ in found))
        print(f"\n{path.name}: {gone} gone or moved, of {len(found)} changes")
        print("".join(f"  {'!' if bad else ' '} {text}\n" for bad, text in found), end="")
    return int(lost > 0)


if __name__ == "__main__":
    sys.exit(main())
