"""Writes that outlast a loss of power."""

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Put a file on the disk, or the names in a folder: a new name is durable only with its folder."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
