"""List the benchmarks: ``make bench``."""

import ast
from pathlib import Path

FOLDER = Path(__file__).parent
PACKAGE = "tests.benchmarks"


def benchmarks() -> dict[str, str]:
    """Return the first line about each benchmark, by its name."""
    found = {}
    for path in sorted(FOLDER.rglob("*.py")):
        text = path.read_text()
        about = ast.get_docstring(ast.parse(text)) or ""
        # The other commands are parts of a benchmark.
        if path != Path(__file__) and f"python -m {PACKAGE}" in about and "def main(" in text:
            parts = path.relative_to(FOLDER).with_suffix("").parts
            name = ".".join(part for part in parts if part != "__main__")
            found[name] = about.partition("\n")[0].partition(":")[0].rstrip(".")
    return found


def main() -> None:
    """Print the names."""
    print('make bench NAME=serve ARGS="--help"; NAME is one of')
    for name, about in benchmarks().items():
        print(f"  {name:16}{about}")


if __name__ == "__main__":
    main()
