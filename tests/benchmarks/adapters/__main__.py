"""Command line of the benchmark of adapters: python -m tests.benchmarks.adapters --help."""

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_app.simulation.profiles import PROFILES
from tests.benchmarks import command, report
from tests.benchmarks.adapters import flood, throughput
from tests.benchmarks.adapters.files import write_adapters
from tests.benchmarks.command import above_0, positive
from tests.benchmarks.measuring import Table, progress
from tests.benchmarks.serve.models import MODELS
from tests.benchmarks.serve.running import UnavailableError

CPU = "none"
"""Name of the device that is none: the demo model runs on the CPU."""

DEVICES = {"throughput": "h100-7b", "flood": "l4-7b"}
"""Devices of the parts. The step of an L4 hardly grows with the requests in it, so its others can be served
beside a flood as fast as without; what is left is the order of the queue."""

QUICK = 0.25
"""Share of the load of `throughput` with `--quick`."""

QUICK_SECONDS, QUICK_RUNNING, QUICK_TOKENS = 6.0, 16, 16
"""Sizes of `flood` with `--quick`."""

EPILOG = """\
throughput: 32 streams, each for an adapter that is drawn anew: all equally popular, or by Zipf's law. The
service and `vllm serve --enable-lora` start one after the other with the same engine arguments, in turns;
a ratio is that of a round. First there is a slot for each of 16 adapters, then for half of them.

flood: light traffic on seven of eight adapters, all through the service, without a tenant. In turns: alone;
beside a flood on the eighth adapter, with --times as many requests as one of the others; beside a flood
beyond the capacity of the engine; and beside that flood when all requests name the same tenant, so that they
go in order of arrival. The p99 is that of the seven.

examples:
  make bench NAME=adapters ARGS="--quick"
  make bench NAME=adapters ARGS="--only throughput --device none"
  make bench NAME=adapters ARGS="--only flood --light 0.35 --times 10"
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command.parser(
        "tests.benchmarks.adapters",
        "Measure LoRA adapters: throughput beside `vllm serve`, and a flood on one of them.",
        EPILOG,
        rounds=5,
        only=DEVICES,
        results="adapters.json",
    )
    parser.add_argument(
        "--device",
        choices=[*PROFILES, CPU],
        help=f"simulated device; {CPU}: the demo model on the CPU "
        f"({', '.join(f'{name}: {device}' for name, device in DEVICES.items())})",
    )
    parser.add_argument("--quick", action="store_true", help="one round, and less of all")
    part = parser.add_argument_group("throughput")
    part.add_argument("--adapters", metavar="N", type=positive, default=throughput.ADAPTERS, help="adapters")
    part.add_argument(
        "--slots", metavar="N", type=positive, nargs="+", default=throughput.SLOTS, help="slots (16 8)"
    )
    part = parser.add_argument_group("flood")
    part.add_argument("--running", metavar="N", type=positive, default=64, help="requests at once")
    part.add_argument("--answer", metavar="N", type=positive, default=64, help="tokens of an answer")
    part.add_argument("--light", type=above_0, default=0.2, help="light load, of the capacity")
    part.add_argument("--times", type=above_0, default=10.0, help="flood, in requests of another")
    part.add_argument("--beyond", type=above_0, default=50.0, help="flood beyond the capacity")
    part.add_argument("--seconds", type=above_0, default=60.0, help="seconds that count, per run")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.rounds, options.slots = 1, options.slots[:1]
        options.seconds, options.running = QUICK_SECONDS, QUICK_RUNNING
        options.answer = QUICK_TOKENS
    missed = 0
    for name in options.only or DEVICES:
        with command.place() as folder:
            try:
                found = PARTS[name](options, folder)
            except UnavailableError as error:
                progress("")
                print(f"{name} is left out: {error}", file=sys.stderr)
                return 1
        missed += command.publish(options, found, _about(options))
    return int(missed > 0)


def _throughput(options: argparse.Namespace, folder: Path) -> Mapping[str, Table]:
    model = MODELS[_device(options, "throughput")](folder)
    adapters = write_adapters(folder / "adapters", options.adapters)
    share = QUICK if options.quick else 1.0
    plan = throughput.Plan(model, adapters, options.slots, options.rounds, share)

    def keep(found: throughput.Found) -> None:
        report.keep(options.results, throughput.tables(plan, found), _about(options))

    return throughput.tables(plan, throughput.measure(plan, folder, keep))


def _flood(options: argparse.Namespace, folder: Path) -> Mapping[str, Table]:
    model = MODELS[_device(options, "flood")](folder)
    plan = flood.Plan(
        model=model,
        adapters=write_adapters(folder / "adapters", flood.ADAPTERS),
        rounds=options.rounds,
        running=options.running,
        tokens=options.answer,
        light=options.light,
        times=options.times,
        beyond=options.beyond,
        seconds=options.seconds,
    )
    return {f"flood, {model.about}": flood.measure(plan, folder)}


PARTS = {"throughput": _throughput, "flood": _flood}


def _about(options: argparse.Namespace) -> dict[str, object]:
    return {"rounds": options.rounds, "quick": options.quick}


def _device(options: argparse.Namespace, part: str) -> str:
    """Return the name of a part's model."""
    device: str = options.device or DEVICES[part]
    return "demo" if device == CPU else device


if __name__ == "__main__":
    sys.exit(main())
