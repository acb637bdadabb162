"""Charts of the results: the TTFT of live traffic and the throughput of batch work beside it."""

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

BLUE, GRAY, RED = "#1f77b4", "#9a9a9a", "#c44e52"


def draw(results: Path) -> str:
    """Draw a JSON file of results into two PNGs beside it, and return a message.

    Args:
        results: The file. `NAME.png` has the curve over all fixed windows, `NAME-beside.png` three bars.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (`make bench-goals` installs it)"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = json.loads(results.read_text())
    charts = {results.with_suffix(".png"): _curve}
    if {"live alone", "batch alone", "goal", "vLLM, in arrival order"} <= found["points"].keys():
        charts[results.with_name(f"{results.stem}-beside.png")] = _bars
    for path, chart in charts.items():
        figure = chart(pyplot, found)
        figure.savefig(path, dpi=150)
        pyplot.close(figure)
    return "drawn to " + ", ".join(os.path.relpath(path) for path in charts)


def _bars(pyplot: Any, found: dict[str, Any]) -> Any:
    """Draw the TTFT of live traffic and the throughput of batch work, together and alone."""
    points = found["points"]
    rows = ["each alone", "saturate, with a goal", "vLLM, in arrival order"]
    colors = [GRAY, BLUE, RED]
    ttft = [points[name]["ttft_p99_ms"] / 1e3 for name in ("live alone", "goal", "vLLM, in arrival order")]
    tokens = [points[name]["bulk_tokens_per_s"] for name in ("batch alone", "goal", "vLLM, in arrival order")]
    figure, (left, right) = pyplot.subplots(1, 2, figsize=(9, 2.7), layout="constrained", sharey=True)
    for axis, values, title, label in (
        (left, ttft, "Live requests: time to first token, p99", _seconds),
        (right, tokens, "Batch work: output tokens per second", "{:.0f}".format),
    ):
        bars = axis.barh(rows, values, color=colors, height=0.62)
        axis.bar_label(bars, [*map(label, values)], padding=4, fontsize=11)
        axis.set_title(title, fontsize=11, loc="left")
        axis.set_xlim(0, max(values) * 1.18)
        axis.xaxis.set_visible(False)
        axis.tick_params(axis="y", length=0, labelsize=11)
        axis.spines[["top", "right", "bottom"]].set_visible(False)
    left.invert_yaxis()
    return figure


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value < 10 else f"{value:.0f} s"


def _curve(pyplot: Any, found: dict[str, Any]) -> Any:
    """Draw the TTFT of live traffic against the throughput of batch work, a point per run."""
    points = found["points"]
    figure, axis = pyplot.subplots(figsize=(8, 4.5), layout="constrained")
    fixed = sorted(
        (point["bulk"], point["bulk_tokens_per_s"], point["ttft_p99_ms"] / 1e3)
        for name, point in points.items()
        if name.startswith("fixed")
    )
    line = [x for _, x, _ in fixed], [y for *_, y in fixed]
    axis.plot(*line, "o-", color=GRAY, label="fixed number of batch requests")
    for window, x, y in fixed:
        axis.annotate(str(window), (x, y), textcoords="offset points", xytext=(5, -13), fontsize=9)
    for name, label, color in (
        ("goal", "saturate, with the goal", BLUE),
        ("vLLM, in arrival order", "vLLM, in arrival order", RED),
    ):
        if name in points:
            point = points[name]
            at = point["bulk_tokens_per_s"], point["ttft_p99_ms"] / 1e3
            axis.plot(*at, "D", markersize=9, color=color, label=label)
    if "batch alone" in points:
        alone = points["batch alone"]["bulk_tokens_per_s"]
        axis.axvline(alone, color="black", linestyle=":", linewidth=1, label="batch work alone")
    if "goal_ms" in found:
        axis.axhline(found["goal_ms"] / 1e3, color=BLUE, linestyle="--", linewidth=1, label="the goal")
    axis.set_yscale("log")
    axis.yaxis.set_major_formatter("{x:g}")
    axis.margins(y=0.1)
    axis.set_xlim(left=0)
    axis.set_xlabel("batch work: output tokens per second")
    axis.set_ylabel("live requests: TTFT p99 (s)")
    axis.set_title(found["model"], fontsize=10, loc="left")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=9, loc="upper left", frameon=False)
    return figure
