"""Folders and files that other users of this machine must not access: control sockets, tokens."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

OTHERS = 0o077
"""The permission bits of group and others."""


def private_folder(folder: Path) -> None:
    """Create a folder that only this user may enter, or remove other users' permissions from an existing one.

    Its parent may be writable for all users.

    Raises:
        PermissionError: The folder belongs to another user, or the path is a link.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, or is a link; remove it")
    close_to_others(folder)


def make_folders(folder: Path) -> None:
    """Create a folder and its parents as far as they are missing, each for this user alone."""
    for missing in [each for each in (*reversed(folder.parents), folder) if not each.exists()]:
        missing.mkdir(0o700, exist_ok=True)
    folder.mkdir(exist_ok=True)


def close_to_others(path: Path) -> None:
    """Remove other users' permissions from a file or folder, if it exists and belongs to this user."""
    with suppress(FileNotFoundError):
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)


def close_session(session: Path) -> None:
    """Make a Ray session's folder private, and keep other users from replacing it.

    When a node starts, Ray makes this folder, which holds the sockets of Ray's processes, and its parent
    writable for all users.
    """
    close_to_others(session)
    with suppress(OSError):
        found = session.parent.stat()
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IWOTH:
            session.parent.chmod(stat.S_IMODE(found.st_mode) | stat.S_ISVTX)


def new_private_file(file: Path, text: str) -> None:
    """Write a new file that other users can't read at any moment.

    Raises:
        FileExistsError: The file exists.
    """
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
        new.write(text)


def token_file(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    """Return the path of Ray's token; anyone with the token can run code as the user of a Ray cluster."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
