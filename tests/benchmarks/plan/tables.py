"""Tables: figures of the service and of the model, and their ratios."""

from collections.abc import Mapping, Sequence
from functools import reduce

from serve_app.tuning.goals import Metric
from serve_app.tuning.planning import Figures
from tests.benchmarks import report
from tests.benchmarks.measuring import Row, Table, ratios
from tests.benchmarks.plan.live import Pair
from tests.benchmarks.plan.load import LoadStep
from tests.benchmarks.plan.loads import Level

CLOSE = 0.9, 1.1
"""Bounds of a ratio that is good enough."""

RATES = {"requests/s": "requests/s", "output": "tokens/s"}
"""Throughput, by name, with its unit."""

TIMES: Mapping[str, tuple[Metric, int]] = {
    "TTFT p50": ("ttft", 50),
    "TTFT p99": ("ttft", 99),
    "TPOT p50": ("tpot", 50),
    "TPOT p99": ("tpot", 99),
}
"""Times in milliseconds, by name."""

TARGETS = {"output", "TTFT p99"}
"""Figures whose ratio has a target."""

LIVE, PLANNED, RATIO = "live", "planned", "live / planned"


def figures(step: LoadStep) -> dict[str, float]:
    """Return the figures of a run by name: requests and tokens per second, times in milliseconds."""
    times = {name: step.figure(*point) * 1e3 for name, point in TIMES.items()}
    return {"requests/s": step.ended_per_s, "output": step.tokens_per_s} | times


def table(level: Level, pairs: Sequence[Pair], plan: Figures, seconds: float) -> Table:
    """Return the table of a load.

    Args:
        level: The load.
        pairs: Its runs, one per round.
        plan: What `saturate plan` says of it, with random numbers of its own.
        seconds: Seconds of a run that count.
    """
    live, planned = ([figures(each) for each in steps] for steps in _steps(pairs))
    rows = []
    for name in live[0]:
        unit = RATES.get(name, "ms")
        seen, said = ([each[name] for each in side] for side in (live, planned))
        rows += [
            Row(f"{name}, {LIVE}", unit, seen),
            Row(f"{name}, {PLANNED}", unit, said),
            _ratio(f"{name}, {RATIO}", ratios(seen, said), target=name in TARGETS),
        ]
    # Rounds of few requests have a p99 that is their slowest one.
    whole, model = (reduce(LoadStep.merged, steps) for steps in _steps(pairs))
    p99 = TIMES["TTFT p99"]
    delays = [one["TTFT p50"] - other["TTFT p50"] for one, other in zip(live, planned, strict=True)]
    rows += [
        _ratio(
            "TTFT p99 of all rounds, live / planned", [whole.figure(*p99) / model.figure(*p99)], target=True
        ),
        Row("TTFT p99, planned from random requests", "ms", [plan[p99] * 1e3]),
        Row("TTFT p50, live - planned", "ms", delays),
        Row("requests", "", [float(pair.live.sent) for pair in pairs]),
        Row("requests in flight, live", "", [pair.live.in_flight for pair in pairs]),
        Row("longest delay of a request in the client", "ms", [pair.live.late_s * 1e3 for pair in pairs]),
        Row("CPU, share of all cores", "%", [100 * pair.cpu_share for pair in pairs]),
    ]
    for group in sorted({name for pair in pairs for name in pair.cpu}):
        rows.append(Row(f"CPU: {group}", "%", [100 * pair.cpu.get(group, 0.0) for pair in pairs]))
    return Table(
        f"{level}; open loop, the same requests at the same times in both, {seconds:g} s after "
        f"{level.warm_up_s:g} s of warm-up; one replica, default settings.",
        rows,
    )


def text(name: str, table: Table) -> str:
    """Return a table as text: a line for each figure, live and planned, and then the other rows."""
    rows = {row.what: row for row in table.rows}
    lines = [("", LIVE, PLANNED, RATIO, "range", "")]
    for figure in [*RATES, *TIMES]:
        live, planned, ratio = (rows.pop(f"{figure}, {side}") for side in (LIVE, PLANNED, RATIO))
        lines.append(
            (
                figure if figure != "output" else "output tokens/s",
                report.number(live.median, "ms" if figure in TIMES else ""),
                report.number(planned.median, "ms" if figure in TIMES else ""),
                f"{ratio.median:.2f}",
                _range(ratio),
                {None: "", True: "met", False: "MISSED"}[ratio.met],
            )
        )
    widths = [max(len(line[column]) for line in lines) for column in range(6)]
    body = [
        "  ".join(
            [line[0].ljust(widths[0]), *(line[column].rjust(widths[column]) for column in range(1, 6))]
        ).rstrip()
        for line in lines
    ]
    setting, others = report.show(name, Table(table.setting, list(rows.values()))).split("\n\n", 1)
    return "\n".join([setting, "", *body, "", others])


def page(found: Mapping[str, Table]) -> str:
    """Return the lines of a page's table: one for each load, by its name with the device."""
    lines = [
        "| | requests/s | output tokens/s | TTFT p50 | TTFT p99 | TPOT p50 | TPOT p99 | CPU |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for name, table in found.items():
        rows = {row.what: row for row in table.rows}
        cells = [report.number(rows[f"requests/s, {LIVE}"].median, "")]
        for figure in ("output", *TIMES):
            ratio = rows[f"{figure}, {RATIO}"]
            first = "" if figure == "output" else f"{report.number(rows[f'{figure}, {LIVE}'].median, 'ms')}: "
            cells.append(f"{first}{ratio.median:.2f} ({_range(ratio)})")
        cells.append(f"{rows['CPU, share of all cores'].median:.0f}%")
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _ratio(what: str, samples: Sequence[float], *, target: bool) -> Row:
    least, most = CLOSE if target else (None, None)
    return Row(what, "x", samples, at_most=most, at_least=least)


def _range(row: Row) -> str:
    return f"{min(row.samples):.2f}\N{EN DASH}{max(row.samples):.2f}"


def _steps(pairs: Sequence[Pair]) -> tuple[list[LoadStep], list[LoadStep]]:
    return [pair.live for pair in pairs], [pair.planned for pair in pairs]
