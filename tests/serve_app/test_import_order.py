"""The import graph of the packages: no cycles, and imports between folders only downward."""

import ast
import re
import sys
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

from serve_app.engine.vllm.seams import PUBLIC, SEAMS
from serve_app.system import ray_seams
from serve_app.system.seams import Seam

ROOT = Path(__file__).parents[2]

ORDER = [
    {"app", "cli"},
    {"dataset", "models", "tuning"},
    {"jobs"},
    {"rows"},
    {"ingress"},
    {"engine"},
    {"ledger", "quotas", "turns"},
    {"auth", "telemetry"},
    {"wire"},
    {"settings"},
    {"simulation"},
    {"client"},
    {"stats"},
    {"api", "batcher", "demo", "system"},
]
"""The folders of `serve_app` from top to bottom, with `app.py`, `client.py`, `stats.py` and `batcher`.

A module imports its own folder and those of lower levels, never another folder of its own level.
"""

Edges = set[tuple[str, str]]


def modules() -> dict[str, Path]:
    """Return the files of both packages by the names of their modules."""
    found = {}
    for package in ("serve_app", "batcher"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


MODULES = modules()


def imported(module: str) -> Iterator[str]:
    """Yield the dotted names that a module imports, those inside functions and for type checkers included."""
    path = MODULES[module]
    package = module.split(".") if path.name == "__init__.py" else module.split(".")[:-1]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) - node.level + 1] if node.level else []
            parts += node.module.split(".") if node.module else []
            yield from (".".join([*parts, alias.name]) for alias in node.names)


def own(name: str) -> str:
    """Return the module of this repository that holds a name, or nothing if none does."""
    while name and name not in MODULES:
        name = name.rpartition(".")[0]
    return name


def edges() -> Edges:
    """Return the pairs of modules of which the first imports the second."""
    found = {(module, own(name)) for module in MODULES for name in imported(module)}
    return {(module, target) for module, target in found if target}


def folder(module: str) -> str:
    """Return the name under which `ORDER` has a module; nothing for the package `serve_app` itself."""
    package, _, rest = module.partition(".")
    return package if package == "batcher" else rest.partition(".")[0]


def level(name: str) -> int:
    """Return the level of a folder, 0 at the top."""
    return next(number for number, names in enumerate(ORDER) if name in names)


def test_every_folder_has_a_level() -> None:
    found = {folder(module) for module in MODULES} - {""}
    assert found <= set().union(*ORDER), "a new folder needs a place in ORDER"
    assert len(found) > 10


def test_no_module_imports_itself_by_way_of_others() -> None:
    graph: dict[str, set[str]] = {module: set() for module in MODULES}
    for module, target in edges():
        graph[module].add(target)
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        raise AssertionError(" imports ".join(reversed(error.args[1]))) from None


def test_folders_import_only_lower_levels() -> None:
    wrong = [
        f"{module} imports {target}"
        for module, target in sorted(edges())
        if folder(module) != folder(target) and level(folder(module)) >= level(folder(target))
    ]
    assert wrong == []


def test_only_the_folder_of_vllm_and_the_simulated_device_import_vllm() -> None:
    importing = {
        module for module in MODULES for name in imported(module) if name.partition(".")[0] == "vllm"
    }
    strangers = {module for module in importing if not module.startswith("serve_app.engine.vllm.")}
    assert strangers == {"serve_app.simulation.vllm_executor"}


def test_every_name_of_vllm_is_public_or_a_seam() -> None:
    used = {name for module in MODULES for name in imported(module) if name.startswith("vllm.")}
    assert used == {f"{module}.{name}" for module, names in PUBLIC.items() for name in names.split()}
    _all_are_asked_for(SEAMS)


def test_every_name_of_ray_is_public_or_a_seam() -> None:
    used = {name for module in MODULES for name in imported(module) if name.startswith("ray.")}
    assert {name for name in used if re.search(r"\._(?!_)", name)} == set()
    _all_are_asked_for(ray_seams.SEAMS)


def _all_are_asked_for(seams: Mapping[str, Seam]) -> None:
    texts = [path.read_text() for module, path in MODULES.items() if not module.endswith("seams")]
    # Names with parts are classes of objects, too, which nobody imports.
    assert {name for name, seam in seams.items() if not seam.parts} <= set(re.findall(r"\w+", "".join(texts)))


def test_the_batcher_imports_only_the_standard_library() -> None:
    allowed = sys.stdlib_module_names | {"batcher"}
    foreign = {
        f"{module} imports {name}"
        for module in MODULES
        if folder(module) == "batcher"
        for name in imported(module)
        if name.partition(".")[0] not in allowed
    }
    assert foreign == set()
