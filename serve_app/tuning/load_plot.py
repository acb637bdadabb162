"""A chart of the loads that were measured."""

import importlib.util
import math
from pathlib import Path
from typing import Any

from serve_app.tuning.load_report import Tuning
from serve_app.tuning.load_step import Step

BLUE, GRAY, RED = "#1f77b4", "#9a9a9a", "#c44e52"


class PlotError(Exception):
    """A chart can't be drawn; the message says what to install."""


def check_plot() -> None:
    """Raise a PlotError if matplotlib is missing: before the load, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(
            "matplotlib is not installed; saturate[plot]; in a checkout: pip install -e '.[plot]'"
        )


def draw(tuning: Tuning, path: Path) -> None:
    """Draw a panel for each goal: its figure against the load, with its bound.

    Args:
        tuning: The result.
        path: The PNG to write, whatever its suffix.

    Raises:
        OSError: The file can't be written.
    """
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    goals = tuning.goals
    figure, axes = pyplot.subplots(
        len(goals), 1, figsize=(8, 3.2 * len(goals)), layout="constrained", sharex=True, squeeze=False
    )
    for goal, (axis,) in zip(goals, axes, strict=True):
        for loop, color, label in (("open", BLUE, "at random times"), ("closed", GRAY, "from clients")):
            steps = [step for step in tuning.steps if step.load.loop == loop]
            _line(axis, steps, goal.metric, goal.percentile, color, label)
        axis.axhline(goal.bound, color=RED, linestyle="--", linewidth=1, label=str(goal))
        axis.set_ylabel(f"{goal.name} (s)")
        axis.set_ylim(0, 3 * goal.bound)
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=9, frameon=False, loc="upper left")
    axes[-1][0].set_xlabel("requests per second")
    # A model may have any name, and dollars in it aren't mathematics.
    title = f"{tuning.model}: {tuning.question}"
    axes[0][0].set_title(title, fontsize=10, loc="left", parse_math=False)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)


def _line(axis: Any, steps: list[Step], metric: Any, percentile: int, color: str, label: str) -> None:
    points = [(step.rate, step.figure(metric, percentile), step.holds) for step in steps]
    finite = sorted(point for point in points if math.isfinite(point[1]))
    if not finite:
        return
    axis.plot([x for x, *_ in finite], [y for _, y, _ in finite], "-", color=color, label=label)
    for holds, marker in ((True, "o"), (False, "x")):
        chosen = [(x, y) for x, y, held in finite if held is holds]
        axis.plot([x for x, _ in chosen], [y for _, y in chosen], marker, color=color)
