"""Follow log files as they grow: the request logs of the Ingress replicas, and the log of a start."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

LOGS = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs/serve")
"""Folder of Serve's logs in the latest Ray session on this machine."""

REQUESTS = "requests_*.log*"
"""Names of the Ingress replicas' request logs in that folder."""

EVERY_S = 0.5
"""Seconds between two reads."""


class LogLines:
    """A thread that follows log files in a folder.

    Args:
        show: Called with each new line, including its line end.
        folder: The folder; it may be created later.
        pattern: Names of the files.
    """

    def __init__(self, show: Callable[[str], None], folder: Path = LOGS, pattern: str = REQUESTS) -> None:
        self._show = show
        self._folder = folder
        self._pattern = pattern
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
                    number = path.stat().st_ino
                    file.seek(self._read.get(number, 0))
                    text = file.read()
            except OSError:
                continue
            whole = text[: text.rfind(b"\n") + 1]
            self._read[number] = self._read.get(number, 0) + len(whole)
            for line in whole.decode(errors="replace").splitlines(keepends=True):
                self._show(line)

    def _run(self) -> None:
        while not self._stop.wait(EVERY_S):
            self.look()
