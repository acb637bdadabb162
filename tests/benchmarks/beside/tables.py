"""The results as text: a table for each case, with its ratios and targets."""

from collections.abc import Mapping, Sequence
from typing import Any

from tests.benchmarks.beside.runs import ARRIVAL, CASES, DEVICE_OF, LIVE_ALONE, OURS, ROWS_ALONE, Case
from tests.benchmarks.beside.traffic import LIVE, LIVE_IN, LIVE_OUT, TOKENS, TPOT_P99, TTFT_P99
from tests.benchmarks.serve.groups import CLIENT

Found = Mapping[str, Mapping[str, Any]]
"""Tables of `report.keep` by the name of the run."""

COLUMNS = (
    ("live", LIVE),
    ("TTFT p50", "live: TTFT p50"),
    ("p90", "live: TTFT p90"),
    ("p99", TTFT_P99),
    ("max", "live: TTFT max"),
    ("/ alone", "ratio"),
    ("TPOT p50", "live: TPOT p50"),
    ("p99", TPOT_P99),
    ("rows tok/s", TOKENS),
    ("/ arrival", "share"),
    ("cores", "cores"),
)


def figures(found: Found, name: str) -> dict[str, float]:
    """Return the figures of a run, and its ratios: `ratio` and `share` where both sides are measured.

    Args:
        found: The results.
        name: Name of the run; without results there are no figures.
    """
    case, _, _ = name.partition("/")
    device = CASES[case].device if case in CASES else case
    seen = _medians(found, name)
    alone, arrival = _medians(found, f"{device}/{LIVE_ALONE}"), _medians(found, f"{case}/{ARRIVAL}")
    if TTFT_P99 in seen and TTFT_P99 in alone:
        seen["ratio"] = seen[TTFT_P99] / alone[TTFT_P99]
    if TOKENS in seen and TOKENS in arrival:
        seen["share"] = seen[TOKENS] / arrival[TOKENS]
    return seen


def systems(found: Found, case: str) -> list[str]:
    """Return the names of the systems that are measured in a case: without live traffic first."""
    measured = [name.partition("/")[2] for name in found if name.partition("/")[0] == case]
    return sorted(measured, key=lambda name: (name != ROWS_ALONE, not name.startswith(OURS), name))


def show(found: Found) -> str:
    """Return the results as text."""
    lines = []
    for name, case in CASES.items():
        device, rows = DEVICE_OF[case.device], case.rows
        measured = [f"{name}/{system}" for system in systems(found, name)]
        if not measured:
            continue
        if f"{case.device}/{LIVE_ALONE}" in found:
            measured.insert(0, f"{case.device}/{LIVE_ALONE}")
        lines += [
            f"{name}: {device.profile}, {device.rate:g} live streams/s, {LIVE_IN} tokens in and {LIVE_OUT} "
            f"out; {rows.in_flight} rows in flight, {rows.prompt} in and {rows.answer} out; times in ms",
            "",
        ]
        titles = ["", *(title for title, _ in COLUMNS)]
        lines += _aligned([titles, *(_line(found, each) for each in measured)])
        lines += [f"  {text}" for text in targets(case, figures(found, f"{name}/{OURS}"))] + [""]
    return "\n".join(lines)


def targets(case: Case, seen: Mapping[str, float]) -> list[str]:
    """Return a line for each target of a case whose figure is measured."""
    asked = (
        ("TTFT p99 / alone", "ratio", case.ratio, 1),
        ("TTFT p99, ms", TTFT_P99, case.ttft_ms, 1),
        ("TPOT p99, ms", TPOT_P99, case.tpot_ms, 1),
        ("rows' tokens/s / arrival order", "share", case.share, -1),
    )
    lines = []
    for what, key, bound, sign in asked:
        if bound is not None and key in seen:
            met = sign * seen[key] <= sign * bound
            relation = "≤" if sign > 0 else "≥"
            lines.append(f"{what}: {seen[key]:.3g}, {relation} {bound:g}: {'met' if met else 'MISSED'}")
    if seen and LIVE in seen and seen[LIVE] < 300:
        lines.append(f"only {seen[LIVE]:.0f} live requests: a p99 takes 300")
    return lines


def _medians(found: Found, name: str) -> dict[str, float]:
    return {row["what"]: row["median"] for row in found[name]["rows"]} if name in found else {}


def _line(found: Found, name: str) -> list[str]:
    seen = figures(found, name)
    cpu = {what: value for what, value in seen.items() if what.startswith("cpu: ")}
    seen["cores"] = sum(cpu.values()) - cpu.get(f"cpu: {CLIENT}", 0.0)
    cells = [name.partition("/")[2]]
    for _, key in COLUMNS:
        value = seen.get(key)
        two = key in ("ratio", "share", "cores")
        cells.append("" if value is None else f"{value:.2f}" if two else f"{value:,.{int(value < 100)}f}")
    # A count has no digits behind the point.
    cells[1] = cells[1].removesuffix(".0")
    return cells


def _aligned(lines: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return [
        "  ".join(
            [line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]
        ).rstrip()
        for line in lines
    ]
