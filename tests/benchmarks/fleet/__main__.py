"""Command line of the fleet's benchmark: python -m tests.benchmarks.fleet --help."""

import argparse
import asyncio
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import httpx

from batcher.stats import percentiles
from serve_app.simulation.options import engine_options
from serve_app.simulation.profiles import PROFILES
from tests.benchmarks import command
from tests.benchmarks.command import above_0, positive
from tests.benchmarks.measuring import Row, Table, progress
from tests.benchmarks.serve.client import run
from tests.benchmarks.serve.groups import memory_mib
from tests.benchmarks.serve.loads import Prompt, fixed
from tests.benchmarks.serve.models import DEMO, Model
from tests.benchmarks.serve.running import Server
from tests.benchmarks.serve.servers import saturate
from tests.benchmarks.serve.ways import chat

LIMIT_S = 300.0
DEVICE = "l4-7b"

EPILOG = """\
Each engine is a simulated device whose steps take --step-ms and no CPU: with long steps, many engines fit on
two cores, and what is measured is how the Ingress replicas share the streams out. Each answers chats of 64
tokens in and --tokens out. The spread is the tokens of the replica that has most, divided by the mean.

example:
  make bench NAME=fleet ARGS="--engines 8 --streams 256"
"""


def measure(options: argparse.Namespace, folder: Path) -> Table:
    """Run the fleet, and return its figures."""
    profile = PROFILES[DEVICE].model_copy(update={"load_s": 0.0, "base_ms": options.step_ms})
    model = Model(
        f"{DEVICE} with steps of {options.step_ms:g} ms", DEMO, engine_options(profile), simulate=profile
    )
    replicas = {"Ingress": options.ingresses, "Engine:demo": options.engines}
    rates, ttft, spreads, cpu = [], [], [], []
    groups: dict[str, list[float]] = {}
    with saturate(model, folder, replicas=replicas) as server:
        wait_for(server, options.engines)
        memory = memory_mib()
        for number in range(options.rounds + 1):
            progress(f"fleet: {f'round {number} of {options.rounds}' if number else 'warming up'}")
            first = number * 10_000
            count = options.streams * (options.answers if number else 1)
            requests = [chat(Prompt(fixed(first + n).text, options.tokens)) for n in range(count)]
            before, used = tokens_of(server), server.usage()
            begun = time.monotonic()
            answers = asyncio.run(run(server.port, options.streams, requests))
            took = time.monotonic() - begun
            usage = server.usage().since(used)
            made = [after - earlier for after, earlier in zip(tokens_of(server), before, strict=True)]
            if not number:
                continue
            total = sum(answer.tokens for answer in answers)
            rates.append(total / took)
            ttft.append([answer.ttft_s * 1e3 for answer in answers])
            spreads.append(max(made) / statistics.mean(made))
            cpu.append(sum(usage.values()) / total * 1e3)
            for name, seconds in usage.items():
                groups.setdefault(name, []).append(seconds / total * 1e3)
    progress("")
    best = options.streams / (options.step_ms / 1e3)
    rows = [
        Row("output tokens", "tokens/s", rates),
        Row("share of what the devices could make", "x", [rate / best for rate in rates]),
        Row("time to first token, p50", "ms", [statistics.median(values) for values in ttft]),
        Row("time to first token, p99", "ms", [percentiles(values, (0.99,))[0] for values in ttft]),
        Row("spread of tokens over the engines", "x", spreads, at_most=1.2),
        Row("CPU per 1,000 tokens", "s", cpu),
        *(Row(f"CPU per 1,000 tokens: {name}", "s", values) for name, values in sorted(groups.items())),
        Row("memory of all processes", "MiB", [memory]),
    ]
    return Table(
        f"{options.engines} simulated engines ({model.about}) and {options.ingresses} Ingress replicas; "
        f"{options.streams} streams at once, {options.answers} answers each, 64 tokens in, "
        f"{options.tokens} out.",
        rows,
    )


def wait_for(server: Server, engines: int) -> None:
    """Wait until so many engines run."""
    deadline = time.monotonic() + LIMIT_S
    while True:
        health = httpx.get(f"http://127.0.0.1:{server.port}/health", timeout=30).json()
        if health["models"]["demo"]["replicas"] == engines:
            return
        if time.monotonic() > deadline:
            raise RuntimeError(f"{engines} engines did not start within {LIMIT_S} s: {health}")
        time.sleep(0.5)


def tokens_of(server: Server) -> list[int]:
    """Return the output tokens of each engine so far, in a fixed order."""
    stats = httpx.get(f"http://127.0.0.1:{server.port}/stats", timeout=60).json()
    replicas = sorted(stats["models"]["demo"]["replicas"], key=lambda each: str(each["replica"]))
    return [each["batcher"]["output_tokens"] for each in replicas]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    parser = command.parser(
        "tests.benchmarks.fleet",
        "Measure a fleet of simulated engines on one machine: how streams are shared out.",
        EPILOG,
        rounds=3,
        results="fleet.json",
    )
    parser.add_argument(
        "--engines", type=positive, default=8, help="engines; each takes about 1.5 GiB of memory"
    )
    parser.add_argument("--ingresses", type=positive, default=2, help="Ingress replicas")
    parser.add_argument("--streams", type=positive, default=256, help="streams at once")
    parser.add_argument("--answers", type=positive, default=2, help="answers per stream and round")
    parser.add_argument("--tokens", type=positive, default=64, help="output tokens of an answer")
    parser.add_argument("--step-ms", type=above_0, default=500.0, help="milliseconds of a step")
    options = parser.parse_args(arguments)
    with command.place() as folder:
        table = measure(options, folder)
    return command.publish(options, {f"fleet, {options.engines} engines": table})


if __name__ == "__main__":
    sys.exit(main())
