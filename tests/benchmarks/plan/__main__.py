"""Command line of the benchmark of plans: python -m tests.benchmarks.plan --help."""

import argparse
import os
import sys
from collections.abc import Mapping, Sequence

from serve_app.client import ServiceError
from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.workload import LengthError
from tests.benchmarks import command, report
from tests.benchmarks.command import above_0
from tests.benchmarks.measuring import Table, progress
from tests.benchmarks.plan import live, tables
from tests.benchmarks.plan.live import Pair
from tests.benchmarks.plan.loads import CASES, Case, Level, case, levels
from tests.benchmarks.plan.planned import trial
from tests.benchmarks.serve.running import UnavailableError

DEFAULT = ["l4-7b", "h100-8b"]
SHARES = [0.5, 0.75, 0.9]

EPILOG = """\
Each run sends requests at random times (Poisson) to a service with one replica on a simulated device, and
gives the same requests at the same times to the model of `saturate plan`. So the two differ by the model and
not by chance. A service serves all runs of its device. --model-ms tries another time of a request outside the
engine in the model alone (`request_ms` of the profile).

examples:
  make bench NAME=plan
  make bench NAME=plan ARGS="--device h100-8b --only short --load 75 --rounds 1 --seconds 20"
  make bench NAME=plan ARGS="--device l4-7b --input 256 --output 64 --load 50 --load 90"
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code.

    It is 1 if a service can't be measured, and with --check if a target is missed; else 0.

    Args:
        arguments: Words of the command line; None: those of this process.
    """
    parser = command.parser(
        "tests.benchmarks.plan",
        "Compare what `saturate plan` says with runs of the service on simulated devices.",
        EPILOG,
        rounds=5,
        only=["short", "long"],
        results="plan.json",
    )
    parser.add_argument(
        "--device", action="append", choices=PROFILES, help=f"device, repeatable ({', '.join(DEFAULT)})"
    )
    parser.add_argument("--input", help="tokens of a prompt, as of `saturate plan`, in place of the cases")
    parser.add_argument("--output", help="tokens of an answer, with --input")
    parser.add_argument(
        "--load", action="append", type=_percent, help="percent of what a replica can do (50, 75, 90)"
    )
    parser.add_argument("--most", type=above_0, default=20.0, help="most requests per second")
    parser.add_argument("--seconds", type=above_0, default=60.0, help="seconds that count, per run")
    parser.add_argument(
        "--model-ms", type=float, help="milliseconds of a request outside the engine (the profile's)"
    )
    options = parser.parse_args(arguments)
    if (options.input is None) != (options.output is None):
        parser.error("--input and --output belong together")
    try:
        own = None if options.input is None else case("own", options.input, options.output)
    except LengthError as error:
        parser.error(str(error))
    plans = {}
    for name in dict.fromkeys(options.device or DEFAULT):
        profile = PROFILES[name]
        if options.model_ms is not None:
            profile = profile.model_copy(update={"request_ms": options.model_ms})
        plans[name] = profile, _levels(profile, own, options)
    found: dict[str, Table] = {}
    failed = False
    for profile, loads in plans.values():
        try:
            _measure(profile, loads, options, found)
        except (UnavailableError, ServiceError) as error:
            failed = True
            progress("")
            print(f"{profile.name} can't be measured: {error}", file=sys.stderr)
    for name, table in found.items():
        print(tables.text(name, table))
    if found:
        print(tables.page(found))
    missed = sum(row.met is False for table in found.values() for row in table.rows)
    print(f"\nwritten to {os.path.relpath(options.results)}; targets missed: {missed}")
    return 1 if failed or (missed and options.check) else 0


def _levels(profile: Profile, own: Case | None, options: argparse.Namespace) -> list[Level]:
    cases = CASES[profile.name] if own is None else [own]
    shares = options.load or SHARES
    return [
        level
        for each in cases
        if not options.only or each.name in options.only or own is not None
        for level in levels(profile, each, shares, options.most)
    ]


def _measure(
    profile: Profile, loads: Sequence[Level], options: argparse.Namespace, found: dict[str, Table]
) -> None:
    """Measure the loads of a device; add their tables by name, and keep them after each run."""
    progress(f"{profile.name}: planning")
    # Before the runs, which need the CPU.
    plans = {level.name: trial(profile, level) for level in loads}
    named = {level.name: level for level in loads}
    about = {
        "rounds": options.rounds,
        "request_ms": profile.request_ms,
    }

    def keep(pairs: Mapping[str, Sequence[Pair]]) -> None:
        made = {
            f"{profile.name}, {level.case}, {level.load:.0%}": tables.table(
                level, pairs[name], plans[name], options.seconds
            )
            for name, level in named.items()
            if name in pairs
        }
        found.update(made)
        report.keep(options.results, made, about)

    with command.place() as folder:
        live.measure(profile, loads, folder, rounds=options.rounds, seconds=options.seconds, after=keep)


def _percent(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, not {text}")
    return value / 100


if __name__ == "__main__":
    sys.exit(main())
