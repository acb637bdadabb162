"""Command line of the benchmark of live traffic beside rows: python -m tests.benchmarks.beside --help."""

import argparse
import fnmatch
import json
import os
import sys
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks import command, report
from tests.benchmarks.beside import plot, tables
from tests.benchmarks.beside.runs import Run, Start, System, Take, by_server, expected_s, measure, runs, take
from tests.benchmarks.command import above_0
from tests.benchmarks.measuring import Table

EPILOG = """\
Measured are live streams and batch rows on one engine, on simulated devices, through the whole service: a
Poisson stream of live requests, and a closed loop of rows with the tier `flex`. The same load goes to vLLM's
own server in arrival order, to the same with priorities (`--scheduling-policy priority`), and to earlier
trees of this project. The ratios are to live traffic alone, and to the rows' tokens/s in arrival order.

A finished run is written at once, and is not made again: the command goes on where it stopped. `--only` makes
the runs that it names again. `--sweep` adds runs with other goals, which the plot shows as a line.

examples:
  make bench NAME=beside ARGS="--dry-run"
  make bench NAME=beside ARGS="--only 'l4-64-64/*' l4/live-alone"
  make bench NAME=beside ARGS="--sweep --tree window=../earlier"
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command.parser(
        "tests.benchmarks.beside",
        "Measure live traffic beside batch rows: a table, a JSON file and a plot.",
        EPILOG,
        results="beside.json",
        check=False,
    )
    parser.add_argument(
        "--only", metavar="CASE/SYSTEM", nargs="+", help="make these runs, again too; may be patterns"
    )
    parser.add_argument(
        "--tree",
        metavar="NAME=PATH",
        type=_tree,
        action="append",
        default=[],
        help="an earlier tree of this project, with a .venv of its own; may be repeated",
    )
    parser.add_argument("--sweep", action="store_true", help="vary the goals too")
    parser.add_argument("--batch", action="store_true", help="send the rows in a batch of the batch API too")
    parser.add_argument(
        "--seconds", type=above_0, help="seconds of each run, and most of its warm-up (for 300 live requests)"
    )
    parser.add_argument(
        "--virtual",
        action="store_true",
        help="virtual time, on vLLM's scheduler without a service; the results are beside those of services",
    )
    parser.add_argument("--dry-run", action="store_true", help="list the runs and their minutes, and end")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    start: Start = System.start
    run: Take = take
    options = parser().parse_args(arguments)
    if options.virtual:
        os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
        from tests.benchmarks.beside import virtual

        start, run = virtual.start, virtual.take
        options.results = options.results.with_stem(options.results.stem + "-virtual")
    planned = runs(dict(options.tree), sweep=options.sweep, batch=options.batch, seconds=options.seconds)
    found = json.loads(options.results.read_text()) if options.results.exists() else {}
    try:
        planned = chosen(planned, found, options.only)
    except ValueError as error:
        print(error, file=sys.stderr)
        return 2
    if options.dry_run:
        print(listing(planned))
        return 0
    with command.place() as folder:
        missing = measure(planned, folder, partial(keep, options.results), start, run)
    if options.results.exists():
        print(tables.show(json.loads(options.results.read_text())))
        print(f"results: {os.path.relpath(options.results)}")
        print(plot.draw(options.results))
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    return 1 if missing else 0


def chosen(planned: Sequence[Run], found: Mapping[str, Any], only: Sequence[str] | None) -> list[Run]:
    """Return the runs to make: those that `only` names, else those without results.

    Raises:
        ValueError: A pattern of `only` names no run.
    """
    if only is None:
        return [run for run in planned if found.get(run.name, {}).get("seconds", 0) < run.traffic.seconds]
    for pattern in only:
        if not fnmatch.filter([run.name for run in planned], pattern):
            raise ValueError(f"{pattern}: no such run; --dry-run lists the runs")
    return [run for run in planned if any(fnmatch.fnmatch(run.name, pattern) for pattern in only)]


def keep(path: Path, run: Run, table: Table) -> None:
    """Write the figures of a run into the file of results."""
    facts = {
        "system": run.system.kind,
        "goals": dict(run.system.goals),
        "seconds": run.traffic.seconds,
    }
    report.keep(path, {run.name: table}, facts)


def listing(planned: Sequence[Run]) -> str:
    """Return the runs as text, by server, with the expected minutes."""
    lines = []
    for group in by_server(planned):
        lines += [f"{run.name:<36}{run.expected_s:>5.0f} s  {run.setting}" for run in group] + [""]
    servers = len(list(by_server(planned)))
    minutes = expected_s(planned) / 60
    return "\n".join([*lines, f"{len(planned)} runs on {servers} servers, about {minutes:.0f} minutes"])


def _tree(text: str) -> tuple[str, Path]:
    name, _, path = text.partition("=")
    if not name or not path:
        raise argparse.ArgumentTypeError(f"must be NAME=PATH, not {text!r}")
    return name, Path(path).resolve()


if __name__ == "__main__":
    sys.exit(main())
