"""Charts of the loads of a tuning."""

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from serve_app.system.distribution import extra
from serve_app.tuning.tuner import Tuning

BLUE, RED = "#1f77b4", "#c44e52"


class PlotError(Exception):
    """A chart can't be drawn; the message says what to install."""


def check_plot() -> None:
    """Raise a PlotError if matplotlib is missing: before the work, not after it."""
    if importlib.util.find_spec("matplotlib") is None:
        raise PlotError(f"matplotlib is missing; install {extra('plot')}")


def draw_tuning(tuning: Tuning, path: Path) -> None:
    """Draw a panel for each goal: its figure against the load, with its bound.

    Args:
        tuning: The result.
        path: The PNG to write, whatever its suffix.

    Raises:
        OSError: The file can't be written.
    """
    figure, axes = _panels(len(tuning.goals), sharex=True)
    points = sorted((point for point in tuning.points if point.completed), key=lambda point: point.value)
    for goal, axis in zip(tuning.goals, axes, strict=True):
        axis.plot([each.value for each in points], [each.seconds[goal.name] for each in points], color=BLUE)
        for marker, kept in (("o", True), ("x", False)):
            chosen = [each for each in points if (not each.misses(tuning.goals)) is kept]
            times = [each.seconds[goal.name] for each in chosen]
            label = "holds" if kept else "breaks"
            axis.plot([each.value for each in chosen], times, marker, color=BLUE, label=label)
        axis.axhline(goal.bound, color=RED, linestyle="--", linewidth=1, label=str(goal))
        axis.set_ylabel(f"{goal.name} (s)")
        axis.set_ylim(0, 3 * goal.bound)
    axes[-1].set_xlabel("clients" if tuning.over == "concurrency" else "requests per second")
    _save(figure, axes, f"{tuning.model}: {tuning.requests}", path)


def _panels(count: int, sharex: bool = False) -> tuple[Any, list[Any]]:
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(
        count, 1, figsize=(8, 3.2 * count), layout="constrained", sharex=sharex, squeeze=False
    )
    return figure, [axis for (axis,) in axes]


def _save(figure: Any, axes: Sequence[Any], title: str, path: Path) -> None:
    from matplotlib import pyplot

    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
        axis.legend(fontsize=9, frameon=False, loc="upper left")
    # A model may have any name, and dollars in it aren't mathematics.
    axes[0].set_title(title, fontsize=10, loc="left", parse_math=False)
    figure.savefig(path, dpi=150, format="png")
    pyplot.close(figure)
