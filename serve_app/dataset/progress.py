"""Progress of a run or of a batch, in words."""

from typing import NamedTuple

from serve_app.dataset.stats import RunStats
from serve_app.system.progress import Progress

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


class Shown(NamedTuple):
    """The progress of a run, as `Progress.show` takes it.

    Attributes:
        text: The figures, as one line.
        done: Rows that are done.
        total: All rows, perhaps an estimate; None: unknown.
        note: Message about the current state; may be empty.
        last: Whether nothing follows.
    """

    text: str
    done: int
    total: int | None
    note: str = ""
    last: bool = False


def open_progress(quiet: bool) -> Progress:
    """Return the display of a run."""
    return Progress(quiet=quiet, timed=False, every_s=LINE_S)


def run_shown(stats: RunStats, before: int, total: int | None, note: str = "") -> Shown:
    """Return the displayed progress of a run.

    Args:
        stats: Its statistics.
        before: Number of rows of earlier runs.
        total: Number of input rows, perhaps an estimate; None: unknown.
        note: Message about the current state.
    """
    done = before + stats.rows
    parts = [
        f"{share(done, total)} rows",
        f"{stats.rows_per_s:,.1f} rows/s",
        f"{stats.tokens_per_s:,.0f} tok/s",
        f"{stats.in_flight} in flight",
    ]
    if (busy := stats.utilization.share) is not None:
        parts.append(f"batcher {busy:.0%} busy")
    if stats.retries:
        parts.append(f"{stats.retries} retries")
    if failed := stats.failed.total():
        parts.append(f"{failed:,} failed")
    parts.append(f"ETA {eta(done, total, stats.rows_per_s)}")
    return Shown(", ".join(parts), done, total, note)


def share(done: int, total: int | None) -> str:
    """Return finished and total rows; the total is an estimate, marked `~`, until all rows are read."""
    return f"{done:,}" if not total else f"{done:,}/{'' if done == total else '~'}{total:,}"


def eta(done: int, total: int | None, rows_per_s: float) -> str:
    """Return the time to the end, at a rate."""
    if not total or not rows_per_s:
        return "?"
    minutes, seconds = divmod(round(max(0, total - done) / rows_per_s), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
