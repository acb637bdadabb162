"""The plot: live requests' TTFT against the rows' throughput."""

import importlib.util
import json
import math
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.beside.runs import (
    ARRIVAL,
    BATCH,
    CASES,
    DEVICE_OF,
    LIVE_ALONE,
    OURS,
    PRIORITIES,
    ROWS_ALONE,
    Case,
)
from tests.benchmarks.beside.tables import Found, figures, systems
from tests.benchmarks.beside.traffic import TOKENS, TTFT_P99
from tests.benchmarks.serve.models import about

COLORS = {OURS: "#1f77b4", BATCH: "#64b5cd", ARRIVAL: "#c44e52", PRIORITIES: "#dd8452"}
OTHERS = ("#55a868", "#8172b3", "#937860")
LABELS = {
    OURS: "saturate (TPOT goal)",
    BATCH: "saturate, rows in a batch",
    ARRIVAL: "vLLM, arrival order",
    PRIORITIES: "vLLM, priorities",
}

TICKS = [digit * size for size in (0.01, 0.1, 1.0, 10.0, 100.0) for digit in (1, 2, 5)]
"""Seconds at an axis."""


def draw(results: Path) -> str:
    """Draw a JSON file of results into a PNG beside it, a panel for each case.

    Returns:
        A message for the user.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (`make bench NAME=beside` installs it)"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = json.loads(results.read_text())
    shown = {name: case for name, case in CASES.items() if TTFT_P99 in figures(found, f"{name}/{OURS}")}
    if not shown:
        return "no plot: live traffic beside rows is not measured"
    figure, axes = pyplot.subplots(
        1, len(shown), figsize=(5 * len(shown), 4), squeeze=False, sharey=True, layout="constrained"
    )
    for axis, (name, case) in zip(axes[0], shown.items(), strict=True):
        _panel(axis, found, name, case)
    axes[0][0].set_ylabel("live requests: time to first token, p99 (s)")
    axes[0][0].legend(fontsize=8, frameon=False)
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=120)
    pyplot.close(figure)
    return f"drawn to {os.path.relpath(path)}"


def _panel(axis: Any, found: Found, name: str, case: Case) -> None:
    """Draw a case: a line for each server whose goals vary, else a point."""
    others = iter(OTHERS)
    for kind, points in series(found, name).items():
        color = COLORS.get(kind) or next(others, "black")
        axis.plot(
            [tokens for tokens, _, _ in points],
            [ttft for _, ttft, _ in points],
            "o-" if kind == OURS else "D--",
            color=color,
            label=LABELS.get(kind, f"{kind} (TTFT goal)"),
        )
        for tokens, ttft, bound in points:
            axis.annotate(
                bound, (tokens, ttft), textcoords="offset points", xytext=(-4, 6), fontsize=7, color=color
            )
    alone = figures(found, f"{case.device}/{LIVE_ALONE}").get(TTFT_P99)
    if alone is not None:
        axis.axhline(alone / 1e3, color="black", linestyle=":", linewidth=1, label="live traffic alone")
    rows_alone = figures(found, f"{name}/{ROWS_ALONE}").get(TOKENS)
    if rows_alone is not None:
        axis.axvline(rows_alone, color="gray", linestyle=":", linewidth=1, label="rows alone")
    rows, device = case.rows, DEVICE_OF[case.device]
    axis.margins(y=0.12)
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.yaxis.set_minor_formatter("")
    low, high = axis.get_ylim()
    axis.set_yticks([tick for tick in TICKS if low < tick < high])
    axis.set_xlim(0, 1.1 * axis.get_xlim()[1])
    axis.set_xlabel("batch rows: output tokens per second")
    axis.set_title(
        f"{about(device.profile)}, {device.rate:g} live streams/s\nrows of {rows.prompt} tokens in and "
        f"{rows.answer} out",
        fontsize=9,
        loc="left",
    )
    axis.spines[["top", "right"]].set_visible(False)


def series(found: Found, case: str) -> dict[str, list[tuple[float, float, str]]]:
    """Return tokens/s of the rows, TTFT p99 in seconds and the label of each point, by server.

    The label of a point is the goal in milliseconds: of a token for this project, of the first token for an
    earlier tree; empty: the server has none. The points of a server are in the order of its goals.
    """
    lines: dict[str, list[tuple[float, tuple[float, float, str]]]] = {}
    for system in systems(found, case):
        facts, seen = found[f"{case}/{system}"], figures(found, f"{case}/{system}")
        if TOKENS not in seen or TTFT_P99 not in seen:
            continue
        kind, goals = facts["system"], facts["goals"]
        goal = goals.get("tpot_p99_s" if kind in (OURS, BATCH) else "ttft_p99_s")
        label = "" if goal is None else f"{goal * 1e3:g} ms"
        point = (seen[TOKENS], seen[TTFT_P99] / 1e3, label)
        lines.setdefault(kind, []).append((goal or math.inf, point))
    return {kind: [point for _, point in sorted(points)] for kind, points in lines.items()}
