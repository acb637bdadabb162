"""Progress display of a run: a bar on a terminal, a periodic line elsewhere."""

import sys
import time
from typing import Any, Protocol

from serve_app.driver.run_stats import RunStats

LINE_S = 10.0
"""Seconds between two lines where there is no terminal."""


class Progress(Protocol):
    """A progress display."""

    def update(self, stats: RunStats, before: int, total: int | None, note: str) -> None:
        """Show the progress.

        Args:
            stats: Statistics of this run.
            before: Number of rows of earlier runs.
            total: Number of input rows, perhaps an estimate; None: unknown.
            note: Message about the current state; may be empty.
        """

    def say(self, text: str) -> None:
        """Print a permanent line."""

    def close(self) -> None:
        """End the display."""


class Silent:
    """No progress."""

    def update(self, stats: RunStats, before: int, total: int | None, note: str) -> None:
        """Show nothing."""

    def say(self, text: str) -> None:
        """Show nothing."""

    def close(self) -> None:
        """Do nothing."""


class Lines:
    """A plain line every ten seconds, for logs."""

    def __init__(self) -> None:
        self._next = time.monotonic() + LINE_S
        self._note = ""

    def update(self, stats: RunStats, before: int, total: int | None, note: str) -> None:
        """Print a line if one is due, and a note if it is new."""
        if note and note != self._note:
            self.say(note)
        self._note = note
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            done = before + stats.totals.rows
            self.say(f"{share(done, total)} rows, {figures(stats)}, ETA {eta(stats, done, total)}")

    def say(self, text: str) -> None:
        """Print a line."""
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Do nothing: lines stay."""


class Bar:
    """A bar on the terminal."""

    def __init__(self) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn

        self._console = Console(stderr=True)
        self._bar = Progress(
            TextColumn("{task.fields[done]}"),
            BarColumn(bar_width=20),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[figures]}"),
            console=self._console,
            transient=True,
        )
        self._task = self._bar.add_task("rows", total=None, done="", figures="starting")
        self._bar.start()

    def update(self, stats: RunStats, before: int, total: int | None, note: str) -> None:
        """Draw the bar."""
        done = before + stats.totals.rows
        shown: dict[str, Any] = {
            "done": share(done, total),
            "figures": f"{figures(stats)}, ETA {eta(stats, done, total)}" + (f"\n{note}" if note else ""),
        }
        self._bar.update(self._task, completed=done, total=total, **shown)

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        self._console.print(text, markup=False, highlight=False)

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


def figures(stats: RunStats) -> str:
    """Return the figures of a run as one line."""
    parts = [
        f"{stats.rows_per_s:,.1f} rows/s",
        f"{stats.tokens_per_s:,.0f} tok/s",
        f"{stats.in_flight} in flight",
    ]
    if (busy := stats.utilization.share) is not None:
        parts.append(f"batcher {busy:.0%} busy")
    if stats.retries:
        parts.append(f"{stats.retries} retries")
    if failed := stats.totals.failed.total():
        parts.append(f"{failed:,} failed")
    return ", ".join(parts)


def share(done: int, total: int | None) -> str:
    """Return finished and total rows; the total is an estimate, marked `~`, until all rows are read."""
    return f"{done:,}" if not total else f"{done:,}/{'' if done == total else '~'}{total:,}"


def eta(stats: RunStats, done: int, total: int | None) -> str:
    """Return the time to the end, at the mean rate of this run."""
    if not total or not stats.totals.rows:
        return "?"
    seconds = round(max(0, total - done) / stats.rows_per_s)
    minutes, seconds = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{seconds:02}" if hours else f"{minutes}:{seconds:02}"
