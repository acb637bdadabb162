"""Progress of a command on standard error: one changing line on a terminal, separate lines elsewhere."""

import sys
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.live import Live


class Progress:
    """The display of a command.

    Args:
        live: Whether the line may change; False if another program writes to this terminal.
        quiet: Show nothing.
        timed: Begin each line with the seconds since the start.
        every_s: Seconds between lines where there is no terminal; None: a line for each new text.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        *,
        live: bool = True,
        quiet: bool = False,
        timed: bool = True,
        every_s: float | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._quiet = quiet
        self._changes = live and not quiet and sys.stderr.isatty()
        self._timed = timed
        self._every_s = every_s
        self._clock = clock
        self._start = clock()
        self._next = self._start + (every_s or 0.0)
        self._shown = self._said = ""
        self._live: Live | None = None

    def show(
        self, text: str, done: int = 0, total: int | None = None, note: str = "", last: bool = False
    ) -> None:
        """Show the current work.

        Args:
            text: A line that describes the work.
            done: The number of finished parts.
            total: The number of all parts; None: no progress bar.
            note: A line about the current state; may be empty.
            last: Whether this is the last call.
        """
        if self._quiet:
            return
        if self._changes:
            # After its terminal is closed, the command works without display.
            with suppress(OSError):
                self._draw(text, done, total, note)
            return
        if note:
            self.say(note)
        if self._every_s is None:
            due = text != self._shown
        elif due := last or self._clock() >= self._next:
            self._next = self._clock() + self._every_s
        if due:
            self._print(text)
        self._shown = text

    def say(self, text: str) -> None:
        """Print a line that stays, unless it repeats the previous line."""
        if not self._quiet and text != self._said:
            self._print(text)
        self._said = text

    def end(self, message: str = "") -> None:
        """Remove the changing line; print a message in its place if there is one."""
        with suppress(OSError):
            if self._live is not None:
                self._live.stop()
        self._live = None
        if message and not self._quiet:
            self._print(message)

    def _print(self, text: str) -> None:
        with suppress(OSError):
            if self._live is not None:
                self._live.console.print(self._time(text), markup=False, highlight=False)
            else:
                sys.stderr.write(f"{self._time(text)}\n")
                sys.stderr.flush()

    def _draw(self, text: str, done: int, total: int | None, note: str) -> None:
        from rich.console import Console, Group
        from rich.live import Live
        from rich.progress_bar import ProgressBar
        from rich.table import Table
        from rich.text import Text

        if self._live is None:
            self._live = Live(console=Console(stderr=True), auto_refresh=False, transient=True)
            self._live.start()
            # A killed command could not show the cursor again.
            self._live.console.show_cursor(True)
        line: RenderableType = Text(self._time(text if total is not None else f"{text} ..."))
        if total is not None:
            grid = Table.grid(padding=(0, 1))
            grid.add_row(ProgressBar(total or 1, done, width=20), f"{done / (total or 1):.0%}", line)
            line = grid
        self._live.update(Group(line, Text(note)) if note else line, refresh=True)

    def _time(self, text: str) -> str:
        return f"[{self._clock() - self._start:3.0f} s] {text}" if self._timed else text
