"""Plot of the results: TTFT of live traffic against throughput of batch work."""

import importlib.util
import json
import os
from pathlib import Path


def draw(results: Path) -> str:
    """Draw a JSON file of results into a PNG beside it; return a message for the user."""
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (`make bench-goals` installs it)"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    found = json.loads(results.read_text())
    points = found["points"]
    figure, axis = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    fixed = sorted(
        (point["bulk"], point["bulk_tokens_per_s"], point["ttft_p99_ms"])
        for name, point in points.items()
        if name.startswith("fixed")
    )
    axis.plot([x for _, x, _ in fixed], [y for *_, y in fixed], "o-", color="tab:gray", label="fixed windows")
    for window, x, y in fixed:
        axis.annotate(str(window), (x, y), textcoords="offset points", xytext=(4, -10), fontsize=7)
    for name, label, style in (
        ("goal", "saturate, with the goal", "tab:blue"),
        ("vLLM, in arrival order", "vLLM, in arrival order", "tab:red"),
    ):
        if name in points:
            point = points[name]
            axis.plot(point["bulk_tokens_per_s"], point["ttft_p99_ms"], "D", color=style, label=label)
    if "batch alone" in points:
        alone = points["batch alone"]["bulk_tokens_per_s"]
        axis.axvline(alone, color="tab:green", linestyle=":", label="batch work alone")
    if "goal_ms" in found:
        axis.axhline(found["goal_ms"], color="tab:blue", linestyle="--", linewidth=1, label="the goal")
    axis.set_yscale("log")
    axis.set_xlim(left=0)
    axis.set_xlabel("batch work: output tokens per second")
    axis.set_ylabel("live traffic: TTFT p99 (ms)")
    axis.set_title(found["model"], fontsize=9)
    axis.legend(fontsize=7)
    path = results.with_suffix(".png")
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
    return f"drawn to {os.path.relpath(path)}"
