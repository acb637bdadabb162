"""A ledger at a URL: `s3://`, `gs://`, or any other scheme of fsspec."""

from pathlib import Path
from typing import Any

from serve_app.system.distribution import extra

NEEDS = f"a ledger at a URL needs the package of its scheme; for s3:// and gs://: {extra('storage')}"


class Remote:
    """The files of a ledger at a URL.

    Args:
        url: The URL.

    Raises:
        ImportError: A package is missing; the message names it.
        ValueError: No package supports the scheme.
    """

    def __init__(self, url: str) -> None:
        try:
            from fsspec.core import url_to_fs
        except ImportError as error:
            raise ImportError(f"{url}: {NEEDS} ({error})") from None
        try:
            found: tuple[Any, str] = url_to_fs(url)
        except ImportError as error:
            raise ImportError(f"{url}: {NEEDS} ({error})") from None
        self._fs, root = found
        self.root = Path(root)

    def write(self, path: Path, data: bytes) -> None:
        """Write a file.

        Args:
            path: Its path below the URL.
            data: Its content.
        """
        target = self.root / path
        # The upload of an object is atomic.
        try:
            self._fs.pipe_file(str(target), data)
        except FileNotFoundError:
            # The file system has folders, and the folder is missing.
            self._fs.makedirs(str(target.parent), exist_ok=True)
            self._fs.pipe_file(str(target), data)
