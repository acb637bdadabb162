"""Paths below a home directory, as users write them."""

import os
from pathlib import Path


def below_home(path: str) -> Path:
    """Return a path with its `~` or `~name` replaced; that of no user stays as it is.

    `Path.expanduser` raises a RuntimeError for no user, which would reach a user as a stack trace; as it is,
    the path isn't there, and is told like any other.
    """
    return Path(os.path.expanduser(path))
