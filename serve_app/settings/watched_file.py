"""A file of settings whose changes are noticed, so that the file is read again."""

import os
from pathlib import Path

from serve_app.settings.schema import SettingsError


class WatchedFile:
    """A file of settings, with a check for changes.

    Args:
        path: Its path.
        setting: The setting that names it, for errors.

    Attributes:
        source: The setting and the path, for errors.
    """

    def __init__(self, path: str, setting: str) -> None:
        self._path = Path(path)
        self.source = f"{setting} ({path})"
        self._seen = self._signature()

    def look(self) -> bool:
        """Return whether the file has changed since the last look; after `unread`, return True."""
        before, self._seen = self._seen, self._signature()
        return self._seen != before

    def unread(self) -> None:
        """Count the file as changed at the next look, since applying its text failed."""
        self._seen = None

    def read(self) -> str:
        """Return its text.

        Raises:
            SettingsError: It can't be read, or is not UTF-8.
        """
        try:
            return self._path.read_text(encoding="utf-8")
        except OSError as error:
            # Once the file is readable, the next look sees a change.
            self._seen = error.errno
            raise SettingsError(f"{self.source}: {error.strerror or error}") from None
        except ValueError:
            raise SettingsError(f"{self.source}: it is not UTF-8") from None

    def _signature(self) -> object:
        """Return a value that differs once the file has changed; the error's number if it can't be read."""
        try:
            # `fstat` below shows no change of permissions, so the file must be opened to know if it is
            # readable.
            with self._path.open("rb") as file:
                status = os.fstat(file.fileno())
        except OSError as error:
            return error.errno
        return status.st_mtime_ns, status.st_size, status.st_ino
