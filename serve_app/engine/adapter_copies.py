"""Copies of adapters in a directory of this process."""

import itertools
import os
import shutil
import tempfile
from pathlib import Path

from serve_app.engine.adapter_files import Adapter, fetch
from serve_app.settings.adapters import AdapterSettings

COPIES = "saturate-adapters-"
"""Prefix of the name of a directory of copies; the id of its process follows."""


class AdapterFiles:
    """Adapters that were fetched into a directory of this process."""

    def __init__(self) -> None:
        _remove_left_behind()
        self._folder = Path(tempfile.mkdtemp(prefix=f"{COPIES}{os.getpid()}-"))
        self._numbers = itertools.count()

    def fetch(self, settings: AdapterSettings) -> Adapter:
        """Fetch an adapter into a directory that no other has had.

        Raises:
            AdapterError: It can't be read.
        """
        path = self._folder / str(next(self._numbers))
        try:
            return fetch(settings.location, path)
        except BaseException:
            shutil.rmtree(path, ignore_errors=True)
            raise

    def close(self) -> None:
        """Delete the directory."""
        shutil.rmtree(self._folder, ignore_errors=True)


def _remove_left_behind() -> None:
    """Delete the directories of processes that were killed."""
    for folder in Path(tempfile.gettempdir()).glob(f"{COPIES}*-*"):
        pid = folder.name.removeprefix(COPIES).partition("-")[0]
        if pid.isdecimal() and not Path("/proc", pid).exists():
            shutil.rmtree(folder, ignore_errors=True)
