"""The package by itself: pure Python, typed, no circles."""

import ast
import sys
from graphlib import TopologicalSorter
from pathlib import Path
from types import ModuleType

import batcher
from tests.progress import run

ROOT = Path(batcher.__file__).parent


def imports(path: Path) -> set[str]:
    """Return the modules that a file imports."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0
            assert node.module is not None
            names = (
                {f"{node.module}.{alias.name}" for alias in node.names} if node.module == "batcher" else set()
            )
            found |= names or {node.module}
    return found


def test_only_the_standard_library_is_needed() -> None:
    for path in ROOT.glob("*.py"):
        assert {name.split(".")[0] for name in imports(path)} <= {*sys.stdlib_module_names, "batcher"}


def test_imports_make_no_circle() -> None:
    graph = {f"batcher.{path.stem}": imports(path) for path in ROOT.glob("*.py") if path.stem != "__init__"}
    list(TopologicalSorter(graph).static_order())


def test_every_public_name_is_there() -> None:
    """A type checker takes a name for public if it is imported as itself."""
    tree = ast.parse((ROOT / "__init__.py").read_text())
    found = [name for node in tree.body if isinstance(node, ast.ImportFrom) for name in node.names]
    assert [name.asname for name in found] == [name.name for name in found]
    public = {name for name, value in vars(batcher).items() if not isinstance(value, ModuleType)}
    assert {name for name in public if not name.startswith("_")} == {name.name for name in found}
    assert len(found) == 35


def test_it_comes_with_its_types() -> None:
    assert (ROOT / "py.typed").is_file()


def test_every_public_attribute_has_a_type() -> None:
    """Type checkers may infer different types where none is stated; `pyright --verifytypes` counts these."""
    for path in ROOT.glob("*.py"):
        for kind in ast.walk(ast.parse(path.read_text())):
            if isinstance(kind, ast.ClassDef):
                assert not untyped(kind), f"{path.name}: {kind.name}"


def untyped(kind: ast.ClassDef) -> set[str]:
    """Return the public attributes of a class that are assigned, and have no type anywhere in it."""
    assigned, typed = set(), set()
    for node in ast.walk(kind):
        if isinstance(node, ast.AnnAssign):
            typed.add(ast.unparse(node.target).removeprefix("self."))
        elif isinstance(node, ast.Assign) and not isinstance(node.value, ast.Name):
            assigned |= {
                target.attr
                for target in node.targets
                if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
            }
        elif isinstance(node, ast.FunctionDef) and node.name == "__init__":
            # An attribute has the type of the argument that it is set to.
            typed |= {each.arg for each in [*node.args.args, *node.args.kwonlyargs]}
    return {name for name in assigned - typed if not name.startswith("_")}


def test_importing_it_is_cheap() -> None:
    code = "import sys, batcher; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    done = run([sys.executable, "-c", code], cwd=ROOT.parent, check=True)
    assert not {"ray", "vllm", "torch", "numpy", "pydantic", "starlette"} & set(done.stdout.split())
