"""Shows the lines that the Ingress replicas of this machine write of their requests, as they are written."""

import os
import threading
from collections.abc import Callable
from pathlib import Path

LOGS = Path(os.environ.get("RAY_TMPDIR", "/tmp"), "ray/session_latest/logs/serve")
"""Where the Ray that was started last on this machine has Serve's logs."""

EVERY_S = 0.5


class RequestLines:
    """Follows the request logs in a folder, in a thread.

    Args:
        show: Given each new line, with its end.
        folder: The folder; it may not be there yet.
    """

    def __init__(self, show: Callable[[str], None], folder: Path = LOGS) -> None:
        self._show = show
        self._folder = folder
        self._read: dict[int, int] = {}
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self) -> None:
        """Show what is left, and end; nothing, where it was not begun."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()
            self.look()

    def look(self) -> None:
        """Show the lines that have come since the last time."""
        for path in sorted(self._folder.glob("requests_*.log*")):
            try:
                with path.open("rb") as file:
                    # A file that is put aside keeps its number, whatever its name.
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
