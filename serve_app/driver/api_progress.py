"""Progress of a batch that runs in the service."""

import sys
import time
from collections.abc import Callable

from serve_app.api.protocol import JSON
from serve_app.driver.progress import LINE_S

ENDED = {"completed", "failed", "expired", "cancelled"}


class Display:
    """Progress of a batch: one line that changes on a terminal, a line every ten seconds elsewhere.

    Args:
        quiet: Show nothing.
        clock: Monotonic clock, in seconds.
    """

    def __init__(self, quiet: bool, clock: Callable[[], float] = time.monotonic) -> None:
        self._quiet = quiet
        self._clock = clock
        self._live = not quiet and sys.stderr.isatty()
        self._began: tuple[float, int] | None = None
        self._next = clock() + LINE_S
        self._said = ""

    def say(self, text: str) -> None:
        """Print a line, unless it is the one before."""
        if not self._quiet and text != self._said:
            self.close()
            print(text, file=sys.stderr, flush=True)
        self._said = text

    def update(self, batch: JSON) -> None:
        """Show a batch."""
        line = self._line(batch)
        if self._live:
            print(f"\r\x1b[K{line}", end="", file=sys.stderr, flush=True)
        elif not self._quiet and (self._clock() >= self._next or batch["status"] in ENDED):
            self._next = self._clock() + LINE_S
            print(line, file=sys.stderr, flush=True)

    def close(self) -> None:
        """Remove the line that changes."""
        if self._live:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def _line(self, batch: JSON) -> str:
        counts = batch["request_counts"]
        total, done = counts["total"], counts["completed"] + counts["failed"]
        parts = [batch["status"]]
        if total:
            parts.append(f"{done:,}/{total:,} rows")
        if counts["failed"]:
            parts.append(f"{counts['failed']:,} failed")
        now = self._clock()
        if self._began is None:
            self._began = now, done
        since, before = self._began
        if done > before and now > since:
            rate = (done - before) / (now - since)
            parts.append(f"{rate:,.1f} rows/s")
            minutes, seconds = divmod(round((total - done) / rate), 60)
            parts.append(f"ETA {minutes}:{seconds:02}")
        return ", ".join(parts)
