"""Faults in the product: where each stands in a tree, and others at random."""

import ast
import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

_FOLDERS = ("ingress", "engine", "jobs", "rows", "quotas", "dataset", "settings", "api", "ledger", "auth")

ROOMS = {
    "batcher": ("batcher/",),
    **{room: (f"serve_app/{room}/",) for room in (*_FOLDERS, "models", "cli", "system", "telemetry", "wire")},
}
"""The folders of each room, with a slash at their ends."""

_SWAPS = {
    **{" < ": " <= ", " <= ": " < ", " > ": " >= ", " >= ": " > ", " == ": " != ", " != ": " == "},
    **{" and ": " or ", " or ": " and ", " + ": " - ", " - ": " + ", " += ": " -= ", " -= ": " += "},
    **{
        " is not ": " is ",
        " is ": " is not ",
        "not ": "",
        "min(": "max(",
        "max(": "min(",
        " in ": " not in ",
    },
}
_SWAPPED = re.compile("|".join(map(re.escape, sorted(_SWAPS, key=len, reverse=True))))

_CHANGES: tuple[tuple[re.Pattern[str], Callable[[re.Match[str]], str]], ...] = (
    (_SWAPPED, lambda found: _SWAPS[found[0]]),
    (re.compile(r"(?<=if )[^:]+(?=:$)"), lambda found: "False"),
    (re.compile(r"(?<=^return ).{6,}"), lambda found: "None"),
    (re.compile(r"^raise .*[^(,]$"), lambda found: "pass"),
    (re.compile(r"^(?!logger|print|super)(await )?[\w.]+\(.*\)$"), lambda found: "pass"),
    (re.compile(r"(?<![\w.])\d+(?![\w.])"), lambda found: str(int(found[0]) + 1)),
    (re.compile(r"^(break|continue)$"), lambda found: "pass"),
)
"""The mistakes that a line may have, and the wrong text of each."""


@dataclass(frozen=True)
class Fault:
    """A wrong line in a function.

    Attributes:
        file: The file.
        function: The function, after its class or the function around it.
        old, new: A part of the line, and what takes its place.
        nth: Which occurrence of the part in the function, from 1.
    """

    file: str
    function: str
    old: str
    new: str
    nth: int = 1

    def __str__(self) -> str:
        nth = f" #{self.nth}" if self.nth > 1 else ""
        return f"{self.file} :: {self.function} :: {self.old}{nth} => {self.new}"

    @property
    def room(self) -> str:
        """The room of the file."""
        return next(room for room, folders in ROOMS.items() if self.file.startswith(folders))

    @property
    def place(self) -> str:
        """The file and the function."""
        return f"{self.file}::{self.function}"


def read(path: Path) -> list[Fault]:
    """Return the faults of a list: FILE :: FUNCTION :: OLD [#NTH] => NEW."""
    faults = []
    for line in path.read_text().splitlines():
        if line and not line.startswith("#"):
            file, function, change = line.split(" :: ", 2)
            old, new = change.split(" => ")
            nth = re.search(r" #(\d+)$", old)
            faults.append(Fault(file, function, old[: nth and nth.start()], new, int(nth[1]) if nth else 1))
    return faults


Function = ast.FunctionDef | ast.AsyncFunctionDef


def functions(tree: ast.AST, prefix: str = "") -> Iterator[tuple[str, Function]]:
    """Yield the functions of a module, with their names."""
    for node in ast.iter_child_nodes(tree):
        inside = prefix
        if isinstance(node, Function | ast.ClassDef):
            inside = f"{prefix}{node.name}."
        if isinstance(node, Function):
            yield prefix + node.name, node
        yield from functions(node, inside)


def product(root: Path, room: str | None = None) -> list[Path]:
    """Return the product's files in a tree, or those of a room."""
    folders = ROOMS[room] if room else [folder for folders in ROOMS.values() for folder in folders]
    return sorted(path for folder in folders for path in (root / folder).rglob("*.py"))


def put(fault: Fault, root: Path) -> str | None:
    """Return the text of the file with the fault; None: its place is gone."""
    path = root / fault.file
    text = path.read_text() if path.exists() else ""
    for name, node in functions(ast.parse(text)):
        if name == fault.function:
            lines = text.splitlines(keepends=True)
            start, end = node.lineno - 1, node.end_lineno
            parts = "".join(lines[start:end]).split(fault.old)
            if len(parts) > fault.nth:
                wrong = fault.new.join(
                    fault.old.join(part) for part in (parts[: fault.nth], parts[fault.nth :])
                )
                return "".join(lines[:start]) + wrong + "".join(lines[end:])
    return None


def find(fault: Fault, root: Path) -> Fault | None:
    """Return the fault where it stands in a tree: its function may have moved to another file."""
    files = [fault.file, *(str(path.relative_to(root)) for path in product(root))]
    moved = (replace(fault, file=file) for file in files)
    return next((each for each in moved if put(each, root) is not None), None)


def at_random(room: str, root: Path, seed: str, avoid: set[str]) -> Fault | None:
    """Return one fault of a room; None: there is none.

    Args:
        room: The room.
        root: The tree.
        seed: The same seed gives the same fault in the same tree.
        avoid: The places of other faults.
    """
    rng = random.Random(seed)
    found = []
    for path in product(root, room):
        file, lines = str(path.relative_to(root)), path.read_text().splitlines()
        for name, node in functions(ast.parse(path.read_text())):
            first = node.body[1 if ast.get_docstring(node) and len(node.body) > 1 else 0].lineno - 1
            for number, line in enumerate(lines[first : node.end_lineno], first):
                for pattern, change in _CHANGES if f"{file}::{name}" not in avoid else ():
                    for match in pattern.finditer(code := line.strip()):
                        # Inside a text it would be wrong words.
                        if code[: match.start()].count('"') % 2 == 0:
                            new = code[: match.start()] + change(match) + code[match.end() :]
                            nth = 1 + "\n".join(lines[node.lineno - 1 : number]).count(code)
                            found.append(Fault(file, name, code, new, nth))
    rng.shuffle(found)
    return next((each for each in found if _compiles(put(each, root))), None)


def _compiles(text: str | None) -> bool:
    try:
        return text is not None and bool(compile(text, "", "exec"))
    except SyntaxError:
        return False
