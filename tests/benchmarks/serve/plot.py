"""Plot of the results."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

from tests.benchmarks.serve.tables import UNITS

SHOWN = (("tokens_per_s",), ("ttft_p99_ms", "latency_p50_ms"), ("cpu",))
"""Columns of the plot, each with alternative quantities; a load has one of them."""


def draw(results: Path) -> str:
    """Draw a JSON file of results into a PNG beside it; return a message for the user."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (`make bench NAME=serve` installs it)"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    tables = {name: table for name, table in json.loads(results.read_text()).items() if name != "start"}
    figure, axes = pyplot.subplots(
        len(tables),
        len(SHOWN),
        figsize=(5 * len(SHOWN), 2.4 * len(tables)),
        squeeze=False,
        layout="constrained",
    )
    for row, (name, table) in zip(axes, tables.items(), strict=True):
        for axis, quantities in zip(row, SHOWN, strict=True):
            for quantity in quantities:
                _bars(axis, table["rows"], quantity)
        row[0].set_ylabel(name, fontweight="bold")
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return f"drawn to {os.path.relpath(path)}"


def draw_streams(results: Path) -> str:
    """Draw the time to first token against the number of streams; return a message for the user.

    Loads whose names end with their number of streams (`device-32`) are drawn.
    """
    tables = json.loads(results.read_text())
    loads = {int(name.rsplit("-", 1)[1]): name for name in tables if name.rsplit("-", 1)[-1].isdigit()}
    if importlib.util.find_spec("matplotlib") is None or len(loads) < 2:
        return ""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, 2, figsize=(9, 3), layout="constrained")
    for axis, quantity in zip(axes, ("ttft_p50_ms", "ttft_p99_ms"), strict=True):
        label, unit = UNITS[quantity]
        series: dict[str, list[tuple[int, float]]] = {}
        for streams, load in sorted(loads.items()):
            for row in tables[load]["rows"]:
                server, _, what = row["what"].rpartition(": ")
                if what == label:
                    series.setdefault(server, []).append((streams, row["median"]))
        for server, points in series.items():
            axis.plot(*zip(*points, strict=True), marker="o", label=server)
        axis.set_xscale("log", base=2)
        axis.set_xticks(sorted(loads), [str(streams) for streams in sorted(loads)])
        axis.set_ylim(bottom=0)
        axis.set_xlabel("streams")
        axis.set_title(f"{label} ({unit})", fontsize=9)
    axes[0].legend(fontsize=8)
    path = results.with_name(f"{results.stem}-streams.png")
    figure.savefig(path, dpi=100)
    pyplot.close(figure)
    return f"drawn to {os.path.relpath(path)}"


def _bars(axis: Any, rows: list[dict[str, Any]], quantity: str) -> None:
    """Draw one quantity of one load: a bar for each server, the range of the samples as a line."""
    label, unit = UNITS[quantity]
    found = [(row["what"].rsplit(": ", 1)[0], row) for row in rows if row["what"].endswith(f": {label}")]
    if not found:
        return
    names = [name for name, _ in found]
    medians = [row["median"] for _, row in found]
    below = [row["median"] - row["low"] for _, row in found]
    above = [row["high"] - row["median"] for _, row in found]
    colors = ["tab:blue" if name.startswith("saturate") else "tab:gray" for name in names]
    axis.barh(names, medians, xerr=[below, above], color=colors, ecolor="black", capsize=2)
    axis.invert_yaxis()
    axis.tick_params(labelsize=7)
    axis.set_title(f"{label} ({unit})", fontsize=8)
