"""Command line of the benchmark of turns: python -m tests.benchmarks.turns --help."""

import argparse
import random
import statistics
import sys
from collections.abc import Sequence

from serve_app.simulation.profiles import PROFILES
from tests.benchmarks import command
from tests.benchmarks.command import above_0
from tests.benchmarks.measuring import Row, Table, progress
from tests.benchmarks.turns import plot
from tests.benchmarks.turns.device import ByRota, OnDemand, Request, Run, bursts, static_parts, take_turns

MODELS = ("a", "b", "c")

EPILOG = """\
Three models get bursts of requests for --seconds, and a few in between. They are served by the service's own
scheduler on one simulated device, by the same device with a switch whenever a request for a model that sleeps
comes, and by three devices that are three times as slow. All of it is virtual time, and takes seconds.

A device serves while steps run; its share of the time counts while there is work. A wait is the time from a
request's arrival to its first token.

example:
  make bench NAME=turns ARGS="--load 20 --rounds 9"
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command.parser(
        "tests.benchmarks.turns",
        "Simulate models that take turns: a table, a JSON file and a picture of the turns.",
        EPILOG,
        rounds=5,
        results="turns.json",
    )
    parser.add_argument("--device", choices=PROFILES, default="h100-7b", help="the device")
    parser.add_argument("--load", type=above_0, default=15.0, help="requests per second of all models")
    parser.add_argument("--seconds", type=above_0, default=60.0, help="time in which requests come")
    parser.add_argument("--min-turn-s", type=above_0, default=5.0, help="min_turn_s")
    parser.add_argument("--max-wait-s", type=above_0, default=30.0, help="max_wait_s")
    return parser


def measure(options: argparse.Namespace) -> tuple[Table, Run]:
    """Return the table, and the first round with turns."""
    profile = PROFILES[options.device]
    names = {"turns": "turns", "demand": "a switch for each request", "parts": "three static parts"}
    runs: dict[str, list[Run]] = {name: [] for name in names}
    bounds = []
    for number in range(options.rounds):
        progress(f"turns: round {number + 1} of {options.rounds}")

        def requests(seed: int = number) -> list[Request]:
            return bursts(MODELS, options.seconds, options.load, random.Random(seed))

        chooser = ByRota(options.min_turn_s, options.max_wait_s)
        runs["turns"].append(take_turns(requests(), profile, chooser))
        bounds.append(options.max_wait_s + chooser.drain_s + profile.sleep_s + profile.wake_s)
        runs["demand"].append(take_turns(requests(), profile, OnDemand()))
        runs["parts"].append(static_parts(requests(), profile))
    progress("")
    bound = statistics.median(bounds)
    rows = [
        Row("turns: share of the time that serves", "", [run.share for run in runs["turns"]], at_least=0.85),
        Row("a switch for each request: the same", "", [run.share for run in runs["demand"]]),
        Row("three static parts: the same", "", [run.share for run in runs["parts"]]),
        Row("turns: wait, p99", "s", [run.ttft_s(0.99) for run in runs["turns"]], at_most=bound),
    ]
    for quantile, text in ((0.99, "p99"), (0.5, "p50")):
        for name, title in names.items():
            if (quantile, name) != (0.99, "turns"):
                rows.append(Row(f"{title}: wait, {text}", "s", [run.ttft_s(quantile) for run in runs[name]]))
    for name, title in names.items():
        rows.append(Row(f"{title}: until the last answer", "s", [run.ended_at for run in runs[name]]))
    for name in ("turns", "demand"):
        rows.append(Row(f"{names[name]}: switches", "", [float(run.switches) for run in runs[name]]))
    setting = (
        f"three models on {options.device}, in virtual time; {options.load:g} requests per second for "
        f"{options.seconds:g} s, in bursts; min_turn_s {options.min_turn_s:g}, max_wait_s "
        f"{options.max_wait_s:g}. The bound of the wait is max_wait_s and a switch with its drain."
    )
    return Table(setting, rows), runs["turns"][0]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(arguments)
    table, first = measure(options)
    status = command.publish(options, {"turns": table}, {"device": options.device})
    print(plot.draw(options.results.with_suffix(".png"), first, options.seconds))
    return status


if __name__ == "__main__":
    sys.exit(main())
