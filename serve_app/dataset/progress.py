"""Progress of a run or of a batch: a bar on a terminal, a line every ten seconds elsewhere."""

import sys
import time
from collections.abc import Callable
from typing import NamedTuple, Protocol

from serve_app.dataset.stats import RunStats

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


class Shown(NamedTuple):
    """The progress of a run, as a display shows it.

    Attributes:
        done: Rows that are done.
        total: All rows, perhaps an estimate; None: unknown.
        text: The figures, as one line.
        note: Message about the current state; may be empty.
        ended: Whether nothing follows.
    """

    done: int
    total: int | None
    text: str
    note: str = ""
    ended: bool = False


class Progress(Protocol):
    """A progress display."""

    def update(self, shown: Shown) -> None:
        """Show the progress."""

    def say(self, text: str) -> None:
        """Print a permanent line, unless it is the one before."""

    def close(self) -> None:
        """End the display."""


class Silent:
    """No progress."""

    def update(self, shown: Shown) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """A plain line every ten seconds, for logs.

    Args:
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._next = clock() + LINE_S
        self._said = ""

    def update(self, shown: Shown) -> None:
        """Print a line if one is due, and a note if it is new."""
        if shown.note:
            self.say(shown.note)
        if shown.ended or self._clock() >= self._next:
            self._next = self._clock() + LINE_S
            print(shown.text, file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        """Print a line, unless it is the one before."""
        if text != self._said:
            print(text, file=sys.stderr, flush=True)
        self._said = text

    def close(self) -> None:
        """Do nothing: lines stay."""


class Bar:
    """A bar on the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        columns = BarColumn(bar_width=20), TextColumn("{task.percentage:>3.0f}% {task.fields[text]}")
        self._bar = Progress(*columns, console=self._console, transient=True)
        self._task = self._bar.add_task("rows", total=None, text="starting")
        self._said = ""
        self._bar.start()

    def update(self, shown: Shown) -> None:
        """Draw the bar."""
        text = f"{shown.text}\n{shown.note}" if shown.note else shown.text
        self._bar.update(self._task, completed=shown.done, total=shown.total, text=text)

    def say(self, text: str) -> None:
        """Print a line above the bar, unless it is the one before."""
        if text != self._said:
            self._console.print(text, markup=False, highlight=False)
        self._said = text

    def close(self) -> None:
        """Remove the bar."""
        self._bar.stop()


def open_progress(quiet: bool) -> Progress:
    """Return the display that fits standard error."""
    if quiet:
        return Silent()
    if sys.stderr.isatty():
        try:
            return Bar()
        except ImportError:
            pass
    return Lines()


def run_shown(stats: RunStats, before: int, total: int | None, note: str = "") -> Shown:
    """Return what is shown of a run.

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
    return Shown(done, total, ", ".join(parts), note)


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
