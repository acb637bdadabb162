"""Paths that users write relative to a home directory."""

import os
from pathlib import Path


def below_home(path: str) -> Path:
    """Return a path with its `~` or `~name` replaced; for an unknown user the path stays unchanged.

    `Path.expanduser` raises a RuntimeError for an unknown user, which would show as a stack trace. The
    unchanged path is reported as missing, like any other path.
    """
    return Path(os.path.expanduser(path))
