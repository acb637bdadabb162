"""Where the time to the first token goes: python -m tests.benchmarks.beside.trace --help.

The stations of a live request come from the service's own traces (`telemetry.traces`) and the client's clock;
all clocks are those of one machine. The traces of the rows are not sampled.
"""

import itertools
import json
import os
import statistics
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from typing import Any

from batcher.stats import percentiles
from serve_app.simulation.profiles import PROFILES
from tests.benchmarks import command, report
from tests.benchmarks.beside.runs import BATCH, DEVICE_OF, OURS, runs, send_load
from tests.benchmarks.command import above_0
from tests.benchmarks.measuring import Row, Table, progress
from tests.benchmarks.serve.client import Answer
from tests.benchmarks.serve.models import simulated
from tests.benchmarks.serve.running import with_log

EXPORT_S = 7.0
"""Seconds until all spans are written: the Ingress ends them each second, OpenTelemetry writes in five."""

SENT, SEEN = "sent", "seen"

STATIONS = (
    ("ingress", "client to Ingress: HAProxy, the Ingress' server"),
    ("relayed", "Ingress: the body, the look into it"),
    ("engine", "choice of the replica, handle to the Engine"),
    ("submitted", "Engine: from the handle to the door"),
    ("started", "door: the wait for a slot"),
    ("tokenized", "vLLM's application: template, tokenizer"),
    ("queued", "to EngineCore's scheduler, after a step under way"),
    ("scheduled", "the wait for a step with room"),
    ("first token", "the steps that were decided before, and its own"),
    ("received", "first token to the Engine"),
    ("first piece", "first piece to the Ingress"),
    (SEEN, "first token to the client: HAProxy"),
)
"""Times of a request in their order, each with a name for what lies between the time before and it."""

TOTAL = "TTFT"

EPILOG = """\
A request passes the client, HAProxy, the Ingress, the Engine's replica and EngineCore. The table has for each
station the p50, the p99 and the mean, and the mean of the twentieth of the requests with the largest TTFT:
the means of all stations add up to those of the TTFT.

examples:
  python -m tests.benchmarks.beside.trace
  python -m tests.benchmarks.beside.trace l4-64-64/saturate --seconds 60
"""


def header(number: int) -> str:
    """Return the header line by which a live request is sampled, as a trace of its number."""
    return f"traceparent: 00-{number + 1:032x}-{number + 1:016x}-01\r\n"


def times(spans: Iterable[Mapping[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the times of each request by station, in seconds since the epoch.

    Args:
        spans: Spans as OpenTelemetry writes them in JSON.
    """
    found: dict[int, dict[str, float]] = {}
    for span in spans:
        of_request = found.setdefault(int(span["context"]["trace_id"], 16) - 1, {})
        names = {"handle": "relayed", "engine": "engine", "queue": "submitted", "generate": "started"}
        of_request[names.get(span["name"], "ingress")] = _seconds(span["start_time"])
        of_request |= {event["name"]: _seconds(event["timestamp"]) for event in span["events"]}
    return found


def stations(
    live: Sequence[Answer], spans: Iterable[Mapping[str, Any]], clock_s: float
) -> list[dict[str, float]]:
    """Return the milliseconds of each live request by station, and its TTFT.

    Requests without all times are left out.

    Args:
        live: Answers to live requests, in the order of their traces.
        spans: The spans.
        clock_s: The time since the epoch less that of the answers' clock, in seconds.
    """
    traced = times(spans)
    found = []
    for number, answer in enumerate(live):
        seen = traced.get(number, {}) | {SENT: answer.sent_at + clock_s, SEEN: answer.first_at + clock_s}
        order = [SENT, *(name for name, _ in STATIONS)]
        if not all(name in seen for name in order):
            continue
        steps = zip(itertools.pairwise(order), STATIONS, strict=True)
        parts = {what: (seen[after] - seen[before]) * 1e3 for (before, after), (_, what) in steps}
        found.append(parts | {TOTAL: answer.ttft_s * 1e3})
    return found


def rows(found: Sequence[Mapping[str, float]]) -> list[Row]:
    """Return p50, p99 and mean of each station, and the mean of the slowest twentieth of the requests."""
    slowest = sorted(found, key=lambda each: each[TOTAL])[-max(1, len(found) // 20) :]
    figures = [Row("requests", "", [float(len(found))])]
    for what in found[0]:
        p50, p99 = percentiles([each[what] for each in found], (0.5, 0.99))
        figures += [
            Row(f"{what}: p50", "ms", [p50]),
            Row(f"{what}: p99", "ms", [p99]),
            Row(f"{what}: mean", "ms", [statistics.fmean(each[what] for each in found)]),
            Row(f"{what}: mean of the slowest", "ms", [statistics.fmean(each[what] for each in slowest)]),
        ]
    return figures


def show(table: Table) -> str:
    """Return the table as text, with a line for each station."""
    head, *figures = table.rows
    columns = ("p50", "p99", "mean", "mean of the slowest")
    width = max(len(what) for _, what in STATIONS)
    lines = [f"{table.setting}; {head.median:.0f} requests, in ms", ""]
    lines.append(f"{'':<{width}}" + "".join(f"{column:>{len(column) + 6}}" for column in columns))
    for at in range(0, len(figures), len(columns)):
        what = figures[at].what.rpartition(": ")[0]
        cells = zip(figures[at : at + len(columns)], columns, strict=True)
        lines.append(f"{what:<{width}}" + "".join(f"{row.median:>{len(name) + 6}.1f}" for row, name in cells))
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit status."""
    every = runs({}, sweep=True, batch=True)
    names = [run.name for run in every if run.system.kind in (OURS, BATCH) and run.traffic.rate]
    parser = command.parser(
        "tests.benchmarks.beside.trace",
        "Trace live requests beside batch rows through all processes of the service.",
        EPILOG,
        results="beside-trace.json",
        check=False,
    )
    parser.add_argument(
        "run",
        nargs="?",
        choices=names,
        metavar="RUN",
        default="h100-64-256/saturate",
        help="a run of this project, as `make bench NAME=beside` lists them (h100-64-256/saturate)",
    )
    parser.add_argument("--seconds", type=above_0, help="seconds of the run, and most of its warm-up")
    options = parser.parse_args(arguments)
    every = runs({}, sweep=True, batch=True, seconds=options.seconds)
    (run,) = (each for each in every if each.name == options.run)
    with command.place() as folder:
        traces = {"endpoint": f"file://{folder}/spans", "sample_ratio": 0.0}
        model = simulated(PROFILES[DEVICE_OF[run.device].profile])
        with run.system.start(model, folder, {"traces": traces}) as server:
            progress(f"{run.name}: {run.expected_s:.0f} s")
            with with_log(server, run.name):
                headers = [header(number) for number in range(len(run.traffic.arrivals()))]
                seen = send_load(run, server, 1, headers)
            time.sleep(EXPORT_S)
        clock_s = time.time() - time.monotonic()
        lines = [line for file in (folder / "spans").iterdir() for line in file.read_text().splitlines()]
    found = stations(seen.live, map(json.loads, lines), clock_s)
    if not found:
        sys.exit(f"none of {len(seen.live)} live requests has a whole trace")
    table = Table(run.setting, rows(found))
    print(show(table))
    report.keep(options.results, {run.name: table}, {"seconds": run.traffic.seconds})
    print(f"written to {os.path.relpath(options.results)}")
    return 0


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


if __name__ == "__main__":
    sys.exit(main())
