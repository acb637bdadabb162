"""Writes that survive a power loss."""

import os
from pathlib import Path


def sync(path: str | Path) -> None:
    """Flush a file or a folder to disk; a new file is durable only after a flush of its folder too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
