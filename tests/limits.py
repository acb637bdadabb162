"""Limits of the tests that may only shrink: inner names of rooms, long names, files without a docstring.

An inner name is a name of a room that its own tests import and that no other room imports: it freezes the
inside of the room. Tests use the room's face: what other rooms import, HTTP, a command, a handle.
`limits.json` has the counts by folder.
`make lint` names a count that has grown; `make reference` lowers the limits to the counts.
"""

import json
import re
from collections import defaultdict
from collections.abc import Mapping
from pathlib import Path

TESTS = Path(__file__).parent
FILE = TESTS / "limits.json"
PACKAGES = ("batcher", "serve_app", "k8s")
MOST_WORDS = 12

IMPORT = re.compile(r"^ *from ([\w.]+) import (\([^)]*\)|[^\n]+)", re.M)
TEST = re.compile(r"^ *(?:async )?def test_(\w+)", re.M)

FIXES = {
    "inner names": "import the room's face, or free another inner name",
    "long names": f"a test's name has at most {MOST_WORDS} words",
    "without a docstring": "a test file begins with what it protects",
}

Counts = Mapping[str, Mapping[str, int]]
"""Counts by what is counted, then by folder."""


def counted(tests: Path = TESTS) -> Counts:
    """Return the counts of today."""
    inner: dict[str, set[str]] = defaultdict(set)
    faces = _faces(tests.parent)
    found: dict[str, dict[str, int]] = {what: defaultdict(int) for what in FIXES}
    for path in sorted(tests.rglob("*.py")):
        folder, text = _folder(path.relative_to(tests)), path.read_text()
        if folder == "batcher" or "/" in folder:
            inner[folder].update(_imported(text, folder.replace("/", ".")) - faces[folder])
        if path.name.startswith("test_"):
            found["long names"][folder] += sum(name.count("_") >= MOST_WORDS for name in TEST.findall(text))
            found["without a docstring"][folder] += not text.startswith('"""')
    found["inner names"] = {folder: len(names) for folder, names in inner.items()}
    return {
        what: {folder: count for folder, count in sorted(counts.items()) if count}
        for what, counts in found.items()
    }


def _folder(path: Path) -> str:
    """Return the room of a file of the tests: two folders, and three for the engine of vLLM."""
    parts = path.parts[:-1]
    return "/".join(parts[: 3 if parts[:3] == ("serve_app", "engine", "vllm") else 2]) or "."


def _faces(tree: Path) -> Mapping[str, set[str]]:
    """Return the names of each room that other rooms import."""
    faces: dict[str, set[str]] = defaultdict(set)
    for path in (path for package in PACKAGES for path in (tree / package).rglob("*.py")):
        user = _folder(path.relative_to(tree))
        for name in _imported(path.read_text()):
            if (room := _folder(Path(*name.split(".")[:-1]))) != user:
                faces[room].add(name)
    return faces


def _imported(text: str, room: str = "") -> set[str]:
    """Return the names that a file imports from modules of a room, with their modules."""
    return {
        f"{module}.{name.split()[0]}"
        for module, names in IMPORT.findall(text)
        if not room or module.startswith(f"{room}.")
        for name in names.strip("()").split(",")
        if name.strip()
    }


def grown(found: Counts, limits: Counts) -> list[str]:
    """Return what has grown, by folder, with the fix; a folder that is renamed takes its count along."""
    return [
        f"tests/{folder}: {what}: {count}, at most {most}: {FIXES[what]}"
        for what, counts in found.items()
        if sum(counts.values()) > sum(limits[what].values())
        for folder, count in counts.items()
        if count > (most := limits[what].get(folder, 0))
    ]


def recorded() -> Counts:
    """Return the limits."""
    found: Counts = json.loads(FILE.read_text())
    return found


def record() -> None:
    """Write the counts of today as the limits."""
    FILE.write_text(json.dumps(counted(), indent=1) + "\n")
