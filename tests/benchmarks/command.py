"""Options, a place for servers, and an end with tables and a file, as all benchmarks have them."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from serve_app.system.processes import adopt_orphans
from tests.benchmarks import report
from tests.benchmarks.measuring import Table, go_first


class _Formatter(argparse.RawDescriptionHelpFormatter, argparse.ArgumentDefaultsHelpFormatter):
    """Keeps the lines of an epilog, and adds the default to the help of an option that has one."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default in (None, False) or isinstance(action.default, list):
            return action.help
        return super()._get_help_string(action)


def parser(
    name: str,
    about: str,
    epilog: str = "",
    *,
    rounds: int | None = None,
    only: Iterable[str] = (),
    results: str = "",
    check: bool = True,
) -> argparse.ArgumentParser:
    """Return the parser of a tool, with the options that benchmarks share.

    Args:
        name: Name of the module.
        about: A sentence about the tool.
        epilog: Further text, with examples.
        rounds: Default of `--rounds`; None: there is no such option.
        only: Choices of `--only`; none: there is no such option.
        results: Name of the JSON file in `results/` as the default of `--results`; empty: the benchmark
            prints its figures alone.
        check: Whether a benchmark with results has `--check`.
    """
    parser = argparse.ArgumentParser(
        prog=f"python -m {name}",
        description=about,
        epilog=epilog,
        formatter_class=_Formatter,
    )
    if rounds is not None:
        parser.add_argument("--rounds", metavar="N", type=positive, default=rounds, help="rounds")
    if only:
        parser.add_argument(
            "--only", metavar="NAME", action="append", choices=only, help="measure this; may be repeated"
        )
    if results:
        path = report.RESULTS / results
        parser.add_argument("--results", metavar="FILE", type=Path, default=path, help="the JSON file")
    if results and check:
        parser.add_argument("--check", action="store_true", help="end with status 1 if a target is missed")
    return parser


def positive(text: str) -> int:
    """Return an integer of at least 1."""
    value = int(text.replace(",", "").replace("_", ""))
    if value < 1:
        raise argparse.ArgumentTypeError(f"must be at least 1, not {value}")
    return value


def above_0(text: str) -> float:
    """Return a finite number above 0."""
    value = float(text)
    if not 0 < value < 1e12:
        raise argparse.ArgumentTypeError(f"must be above 0, not {text}")
    return value


@contextmanager
def place() -> Iterator[Path]:
    """Yield a folder for servers and their files; SIGTERM leaves the block, which stops the servers."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    go_first()
    adopt_orphans()
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        yield Path(folder)


def publish(
    options: argparse.Namespace, tables: Mapping[str, Table], about: Mapping[str, Any] | None = None
) -> int:
    """Print tables, and write them to the file of results; return the exit status.

    Args:
        options: Options of a parser with `results`.
        tables: Tables by name.
        about: Further facts about the run.
    """
    for name, table in tables.items():
        print(report.show(name, table))
    report.keep(options.results, tables, about or {})
    missed = sum(row.met is False for table in tables.values() for row in table.rows)
    print(f"written to {os.path.relpath(options.results)}; targets missed: {missed}")
    return int(options.check and missed > 0)
