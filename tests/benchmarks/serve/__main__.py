"""Command line of the service's benchmark: python -m tests.benchmarks.serve --help."""

import argparse
import shutil
import sys
from collections.abc import Mapping, Sequence

from serve_app.simulation.profiles import PROFILES
from tests.benchmarks import command, report
from tests.benchmarks.measuring import Table
from tests.benchmarks.serve import plot, tables
from tests.benchmarks.serve.loads import ALL_LOADS, DEVICE_LOADS, LOADS
from tests.benchmarks.serve.models import GPU_MODELS, MODELS, about
from tests.benchmarks.serve.rounds import START, Found, Plan, measure
from tests.benchmarks.serve.servers import DEFAULT, DEFAULT_ON_DEVICE, ON_DEVICE, OURS, SERVERS, VARIANTS
from tests.benchmarks.serve.ways import ways

QUICK = 0.25
"""Share of each load with `--quick`."""

EPILOG = """\
Method: each round starts every server once, one after the other and in another order each time, all with the
same model and engine arguments. A ratio is taken between two servers of one round, and the table shows the
median over the rounds and the range. Every answer is checked for its number of tokens. CPU time is given per
1,000 output tokens and by kind of process, the client included.

Choice of options: a round of everything takes about ten minutes on two cores, mostly for starting servers;
name loads and servers for less. `--quick` is for a check after a change. Take five rounds at least for
numbers to keep, on a machine without other load; more if ranges are wide.

examples:
  make bench NAME=serve
  make bench NAME=serve ARGS="--device h100-7b"
  make bench NAME=serve ARGS="--only stream-32 --server saturate --server 'vllm serve' --rounds 3"
  make bench-gpu ARGS="--rounds 3"
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = command.parser(
        "tests.benchmarks.serve",
        "Measure the service beside other servers: tables, a JSON file and a plot.",
        EPILOG,
        rounds=5,
        only=ALL_LOADS,
        results="serve.json",
    )
    parser.add_argument("--list", action="store_true", help="list loads, servers and models, and end")
    parser.add_argument(
        "--server",
        metavar="NAME",
        action="append",
        choices=SERVERS,
        help=f"may be repeated (all but {' and '.join(map(repr, VARIANTS))})",
    )
    parser.add_argument(
        "--model",
        metavar="NAME",
        choices=[name for name in MODELS if name not in PROFILES],
        help="serve this one to all loads (each has a model of its own)",
    )
    parser.add_argument(
        "--device",
        metavar="NAME",
        choices=PROFILES,
        help=f"serve on a simulated device, with loads for it: {', '.join(PROFILES)}",
    )
    parser.add_argument("--quick", action="store_true", help="a quarter of each load")
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(arguments)
    if options.list:
        print(listing())
        return 0
    there = DEVICE_LOADS if options.device else LOADS
    servers = options.server or (DEFAULT_ON_DEVICE if options.device else DEFAULT)
    if options.device and options.model:
        print("--model and --device exclude each other", file=sys.stderr)
        return 2
    if wrong := [name for name in options.only or () if name not in there]:
        print(f"{wrong[0]}: not a load for this; choose from {', '.join(there)}", file=sys.stderr)
        return 2
    if options.device and (wrong := [name for name in servers if name not in ON_DEVICE]):
        print(f"{wrong[0]}: doesn't run on a simulated device; {', '.join(ON_DEVICE)} do", file=sys.stderr)
        return 2
    loads = {name: there[name] for name in options.only or there}
    model = options.device or options.model
    if options.model in GPU_MODELS and shutil.which("nvidia-smi") is None:
        print(f"the model {options.model} needs a GPU, and there is no nvidia-smi here", file=sys.stderr)
        return 2
    share = QUICK if options.quick else 1.0
    plan = Plan(servers, loads, options.rounds, share, model)
    if model:
        options.results = options.results.with_stem(f"{options.results.stem}-{model}")

    def tables_of(found: Found) -> Mapping[str, Table]:
        shown = {
            name: tables.table(loads[name], name, found[name], plan.model(name))
            for name in loads
            if found[name]
        }
        return shown | {START: tables.start_table(found[START])}

    about = {"rounds": options.rounds, "share": share}
    with command.place() as folder:
        found, missing = measure(
            plan, folder, lambda found: report.keep(options.results, tables_of(found), about)
        )
    status = command.publish(options, tables_of(found), about | {"left_out": missing})
    for name, why in missing.items():
        print(f"left out: {name}: {why}")
    print(plot.draw(options.results))
    if drawn := plot.draw_streams(options.results):
        print(drawn)
    return 1 if OURS in missing else status


def listing() -> str:
    """Return loads, servers and models as text."""
    lines = ["loads:"]
    for name, load in ALL_LOADS.items():
        lines += [f"  {name:<16}{load.about}; {load.lengths}", f"{'':<18}for {', '.join(ways(load))}"]
    lines += ["servers:"] + [f"  {name:<22}{words}" for name, (_, words) in SERVERS.items()]
    lines += ["models:"] + [f"  {name:<16}{about(name)}" for name in MODELS]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
