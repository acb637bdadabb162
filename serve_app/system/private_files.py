"""Folders and files that other users of this machine must not enter: sockets of control, tokens."""

import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

OTHERS = 0o077
"""The permissions of a group and of others."""


def private_folder(folder: Path) -> None:
    """Make a folder that only this user may enter, in one that all users write to; or close one that exists.

    Raises:
        PermissionError: The folder belongs to another user, or the path is a link.
    """
    folder.mkdir(0o700, parents=True, exist_ok=True)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid():
        raise PermissionError(f"{folder} belongs to another user, or is a link; remove it")
    close_to_others(folder)


def close_to_others(path: Path) -> None:
    """Take the permissions of others from a file or folder, if it is there and belongs to this user."""
    with suppress(FileNotFoundError):
        found = path.stat()
        if found.st_uid == os.geteuid() and found.st_mode & OTHERS:
            path.chmod(stat.S_IMODE(found.st_mode) & ~OTHERS)


def close_session(session: Path) -> None:
    """Close the folder of a Ray session to others, and keep them from laying another one in its place.

    Ray lets everybody write into the folder, which has the sockets of its processes, and into the one that it
    is in; it does so when a node starts.
    """
    close_to_others(session)
    with suppress(OSError):
        found = session.parent.stat()
        if found.st_uid == os.geteuid() and found.st_mode & stat.S_IWOTH:
            session.parent.chmod(stat.S_IMODE(found.st_mode) | stat.S_ISVTX)


def new_private_file(file: Path, text: str) -> None:
    """Write a new file that nobody else can read at any moment.

    Raises:
        FileExistsError: It exists.
    """
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as new:
        new.write(text)


def token_file(environment: Mapping[str, str] = os.environ, home: Path | None = None) -> Path:
    """Return the file of Ray's token, with which anyone can run code as the user of a Ray cluster."""
    return Path(environment.get("RAY_AUTH_TOKEN_PATH") or (home or Path.home()) / ".ray" / "auth_token")
