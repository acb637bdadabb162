"""Follow log files as they grow: the request logs of the Ingress replicas, and the log of a start."""

import threading
from collections.abc import Callable
from pathlib import Path

REQUESTS = "requests_*.log*"
"""Names of the Ingress replicas' request logs in the folder of Serve's logs."""

EVERY_S = 0.5
"""Seconds between two reads."""


class LogLines:
    """A thread that follows log files in a folder.

    Args:
        show: Called with each new line, including its line end.
        folder: The folder; it may be created later.
        pattern: Names of the files.
        since: Time in seconds since 1970; files that have not changed since are shown only from their end on.
    """

    def __init__(
        self, show: Callable[[str], None], folder: Path, pattern: str = REQUESTS, since: float = 0.0
    ) -> None:
        self._show = show
        self._folder = folder
        self._pattern = pattern
        self._since = since
        self._read: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Show the last lines and end the thread; before `start` this does nothing."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self.look()

    def look(self) -> None:
        """Show the lines that are new since the last read."""
        for path in sorted(self._folder.glob(self._pattern)):
            try:
                with path.open("rb") as file:
                    # A rotated file keeps its inode number under its new name.
                    state = path.stat()
                    number, old = state.st_ino, state.st_mtime < self._since
                    begin = self._read.setdefault(number, state.st_size if old else 0)
                    file.seek(begin)
                    text = file.read()
            except OSError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[number] = begin + len(whole)
            for line in whole.decode(errors="replace").splitlines(keepends=True):
                self._show(line)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.look()
