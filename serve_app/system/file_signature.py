"""Signatures of files, by which a change is noticed."""

import os
from pathlib import Path


def file_signature(path: Path) -> object:
    """Return a value that differs once a file has changed; of one that can't be read, the error's number."""
    try:
        # Permissions change without a trace in what follows: a file counts as there once it can be opened.
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
    except OSError as error:
        return error.errno
    return status.st_mtime_ns, status.st_size, status.st_ino
