"""Picture of the turns: what the device does, and what waits for each model."""

import importlib.util
import os
from pathlib import Path

from tests.benchmarks.turns.device import Run

COLORS = {"a": "#1f77b4", "b": "#2ca02c", "c": "#c44e52"}
SWITCH = "#222222"


def draw(path: Path, run: Run, seconds: float) -> str:
    """Draw a run into a PNG, and return a message.

    Args:
        path: The file.
        run: The run.
        seconds: Seconds to draw.
    """
    if importlib.util.find_spec("matplotlib") is None:
        return "no plot: matplotlib is not installed (`make bench NAME=turns` installs it)"
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, (above, below) = pyplot.subplots(
        2, 1, figsize=(10, 4), layout="constrained", sharex=True, height_ratios=[1, 2]
    )
    models = sorted({one.model for one in run.requests})
    for span in run.spans:
        color = SWITCH if span.what == "switches" else COLORS[span.model]
        alpha = 0.45 if span.what == "stops" else 1.0
        row = models.index(span.model)
        above.broken_barh(
            [(span.began, span.ended - span.began)], (row - 0.4, 0.8), color=color, alpha=alpha, linewidth=0
        )
    above.set_yticks(range(len(models)), models)
    above.invert_yaxis()
    above.set_title(
        "Steps of each model; pale: nothing new starts; black: sleep and wake-up", fontsize=10, loc="left"
    )
    for model in models:
        events = sorted(
            [(one.at, 1) for one in run.requests if one.model == model]
            + [(one.first_at, -1) for one in run.requests if one.model == model]
        )
        times, counts, count = [0.0], [0], 0
        for at, change in events:
            count += change
            times.append(at)
            counts.append(count)
        below.step(times, counts, where="post", color=COLORS[model], label=model, linewidth=1.2)
    below.set_title("Requests without a first token", fontsize=10, loc="left")
    below.set_xlabel("seconds")
    below.set_xlim(0, seconds)
    below.set_ylim(bottom=0)
    below.legend(fontsize=9, frameon=False)
    for axis in (above, below):
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f"drawn to {os.path.relpath(path)}"
