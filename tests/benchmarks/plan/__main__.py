"""Command line of the benchmark of plans: python -m tests.benchmarks.plan --help."""

import argparse
import asyncio
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from serve_app.simulation.profiles import PROFILES, Profile
from serve_app.tuning.fleet import ReplicaSettings
from serve_app.tuning.load import Bench, BenchError, LoadPoint, shown
from serve_app.tuning.planning import RUNS, Trial, Trials
from tests.benchmarks import command, report
from tests.benchmarks.command import above_0
from tests.benchmarks.measuring import Row, Table, progress
from tests.benchmarks.plan.loads import CASES, Level, levels
from tests.benchmarks.serve.models import simulated
from tests.benchmarks.serve.running import Server, UnavailableError, with_log
from tests.benchmarks.serve.servers import saturate

SHARES = [0.5, 0.75, 0.9]

CLOSE = 0.9, 1.1
"""Bounds of a ratio that is good enough."""

TARGETS = {"tokens/s", "TTFT p50"}
"""Figures whose ratio has a target."""

EPILOG = """\
vLLM's benchmark sends requests at random times to a service with one replica on a simulated device, and the
same load is planned with other random numbers: the two differ by the plan, and by chance. A service serves
all loads of its device.

examples:
  make bench NAME=plan
  make bench NAME=plan ARGS="--device h100-8b --only short --load 75 --rounds 1 --seconds 20"
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
        rounds=3,
        only=["short", "long"],
        results="plan.json",
    )
    parser.add_argument(
        "--device", action="append", choices=CASES, help=f"device, repeatable ({', '.join(CASES)})"
    )
    parser.add_argument(
        "--load", action="append", type=_percent, help="percent of what a replica can do (50, 75, 90)"
    )
    parser.add_argument("--most", type=above_0, default=20.0, help="most requests per second")
    parser.add_argument("--seconds", type=above_0, default=60.0, help="seconds that count, per run")
    options = parser.parse_args(arguments)
    found: dict[str, Table] = {}
    failed = False
    for name in dict.fromkeys(options.device or CASES):
        profile = PROFILES[name]
        loads = [
            level
            for each in CASES[name]
            if not options.only or each.name in options.only
            for level in levels(profile, each, options.load or SHARES, options.most)
        ]
        try:
            with command.place() as folder:
                found |= _measure(profile, loads, folder, options)
        except (UnavailableError, BenchError) as error:
            failed = True
            progress("")
            print(f"{name} can't be measured: {error}", file=sys.stderr)
    for name, table in found.items():
        print(report.show(name, table))
    missed = sum(row.met is False for table in found.values() for row in table.rows)
    print(f"\nwritten to {os.path.relpath(options.results)}; targets missed: {missed}")
    return 1 if failed or (missed and options.check) else 0


def _measure(
    profile: Profile, loads: Sequence[Level], folder: Path, options: argparse.Namespace
) -> dict[str, Table]:
    """Return the tables of a device's loads by name; they are kept after each run."""
    progress(f"{profile.name}: planning")
    # Before the runs, which need the CPU.
    plans = [
        Trials(profile, level.workload, ()).trial(1, ReplicaSettings.of(profile), RUNS) for level in loads
    ]
    points: list[list[LoadPoint]] = [[] for _ in loads]
    shares: list[list[float]] = [[] for _ in loads]
    made: dict[str, Table] = {}
    progress(f"{profile.name}: starting the service")
    with saturate(simulated(profile), folder) as server:
        for number in range(options.rounds):
            for place, level in enumerate(loads):
                progress(f"{profile.name}: round {number + 1} of {options.rounds}, {level}")
                before, began = server.usage(), time.monotonic()
                with with_log(server, level.name):
                    # No two runs have a prompt in common, which would be in the prefix cache.
                    seed = 1 + number * len(loads) + place
                    points[place].append(asyncio.run(_run(server, level, options.seconds, seed)))
                used = sum(server.usage().since(before).values())
                shares[place].append(100 * used / (time.monotonic() - began) / (os.cpu_count() or 1))
                made[f"{profile.name}, {level.name}"] = _table(
                    level, points[place], plans[place], shares[place]
                )
                report.keep(options.results, made, {"rounds": options.rounds})
    progress("")
    return made


async def _run(server: Server, level: Level, seconds: float, seed: int) -> LoadPoint:
    bench = Bench(
        f"http://127.0.0.1:{server.port}",
        "demo",
        None,
        "rate",
        level.case.input,
        level.case.output,
        (),
        seconds,
        seed=seed,
    )
    async with bench:
        # The first load is for code paths, connections, and the time that a request takes.
        await bench.alone()
        point = await bench.measure(level.workload.rate)
    if point.failed:
        raise UnavailableError(f"{point.failed} requests failed: {point.error}")
    return point


def _table(level: Level, points: Sequence[LoadPoint], plan: Trial, shares: Sequence[float]) -> Table:
    """Return the figures of a load: the service's, the planned ones, and their ratios."""
    rate = level.workload.rate * level.workload.output.expected
    rows = [*_compared("tokens/s", "tokens/s", [point.tokens_per_s for point in points], rate)]
    for goal in shown(()):
        name = f"{goal.metric.upper()} p{goal.percentile}"
        seen = [point.seconds[goal.name] * 1e3 for point in points]
        rows += _compared(name, "ms", seen, plan.figures[goal.key] * 1e3)
    rows += [
        Row("requests", "", [float(point.completed) for point in points]),
        Row("CPU, share of all cores", "%", shares),
    ]
    return Table(f"{level}; open loop, one replica, default settings.", rows)


def _compared(name: str, unit: str, seen: Sequence[float], planned: float) -> list[Row]:
    least, most = CLOSE if name in TARGETS else (None, None)
    return [
        Row(f"{name}, live", unit, seen),
        Row(f"{name}, planned", unit, [planned]),
        Row(f"{name}, live / planned", "x", [each / planned for each in seen], at_most=most, at_least=least),
    ]


def _percent(text: str) -> float:
    value = float(text)
    if not 0 < value < 100:
        raise argparse.ArgumentTypeError(f"must be between 0 and 100, not {text}")
    return value / 100


if __name__ == "__main__":
    sys.exit(main())
