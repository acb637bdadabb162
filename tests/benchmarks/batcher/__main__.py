"""Command line of the batcher's benchmarks: python -m tests.benchmarks.batcher --help."""

import argparse
import sys
from collections.abc import Callable, Sequence

from tests.benchmarks import command
from tests.benchmarks.batcher import (
    burst,
    lone,
    memory,
    padding,
    per_record,
    queue_scale,
    simulation,
    slots,
)
from tests.benchmarks.measuring import Options, Table

BENCHMARKS: dict[str, tuple[Callable[[Options], Table], str]] = {
    "per-record": (per_record.measure, "CPU time per record with an empty function, beside flyte and Ray"),
    "burst": (
        burst.measure,
        "time to drain a burst while batches run (10 s a round: @serve.batch is slow)",
    ),
    "lone": (lone.measure, "latency added to a single record; size of batches under load"),
    "padding": (padding.measure, "padding of lognormal lengths, against sorting everything offline"),
    "queue": (queue_scale.measure, "add + take of RequestQueue, from a thousand to a million waiting"),
    "memory": (memory.measure, "bytes per queued record; ten million records passed through"),
    "slots": (slots.measure, "enter + leave of a ContinuousBatcher slot, without and with contention"),
    "simulation": (simulation.measure, "a million requests over a thousand replicas"),
}

EPILOG = """\
benchmarks:
{names}

How to read the table: the median over the rounds, the range of the samples, the target, and whether the
median meets it. A ratio is taken between two runs of the same round, and the median over the ratios.
CPU time is that of this process, so that other load on the machine disturbs it little; the seconds of `burst`
and the milliseconds of `lone` are wall time.

Choice of options: with the defaults it takes about ten minutes. `--quick` is for a check after a change.
Raise `--rounds` when ranges are wide; `--records` below 20,000 measures the start more than the run.

examples:
  make bench NAME=batcher
  python -m tests.benchmarks.batcher --only per-record --rounds 11
  python -m tests.benchmarks.batcher --quick --check
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    width = max(map(len, BENCHMARKS))
    names = "\n".join(f"  {name:<{width}}  {about}" for name, (_, about) in BENCHMARKS.items())
    parser = command.parser(
        "tests.benchmarks.batcher",
        "Measure the batcher.",
        EPILOG.format(names=names),
        rounds=5,
        only=BENCHMARKS,
        results="batcher.json",
    )
    parser.add_argument(
        "--records",
        metavar="N",
        type=command.positive,
        default=100_000,
        help="records of one run of per-record, queue and slots",
    )
    parser.add_argument(
        "--quick", action="store_true", help="leave out the largest sizes of queue, memory and simulation"
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the chosen benchmarks; return the exit status."""
    given = parser().parse_args(arguments)
    options = Options(given.rounds, given.records, given.quick)
    missed = 0
    for name in given.only or BENCHMARKS:
        table = BENCHMARKS[name][0](options)
        missed += command.publish(given, {name: table}, {"rounds": options.rounds})
    return int(missed > 0)


if __name__ == "__main__":
    sys.exit(main())
