"""Progress of a start or a stop, on standard error."""

import sys
import time
from contextlib import suppress

CLEAR_LINE = "\r\033[K"


class Progress:
    """A line that counts the seconds on a terminal; elsewhere a line for each stage.

    Args:
        live: Whether the line may be rewritten: no other program writes to this terminal.
    """

    def __init__(self, live: bool = True) -> None:
        self._live = live and sys.stderr.isatty()
        self._start = time.monotonic()
        self._stage = ""

    def show(self, stage: str) -> None:
        """Show the current stage."""
        if self._live:
            self._write(f"{CLEAR_LINE}[{self._seconds():3.0f} s] {stage} ...")
        elif stage != self._stage:
            self._write(f"[{self._seconds():3.0f} s] {stage}\n")
        self._stage = stage

    def end(self, message: str) -> None:
        """Replace the line with a message that stays."""
        self._write(f"{CLEAR_LINE if self._live else ''}[{self._seconds():3.0f} s] {message}\n")

    def _seconds(self) -> float:
        return time.monotonic() - self._start

    @staticmethod
    def _write(text: str) -> None:
        # A terminal that is closed takes no more text, and the stop goes on without it.
        with suppress(OSError):
            sys.stderr.write(text)
            sys.stderr.flush()
