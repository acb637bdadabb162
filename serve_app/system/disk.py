"""Writes that survive a power loss."""

import os
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path


def sync(path: str | Path) -> None:
    """Flush a file or a folder to disk; a new file is durable only after a flush of its folder too."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


@contextmanager
def drafted(path: Path) -> Iterator[Path]:
    """Yield the path of a draft, and replace the file with the draft at the end, durably.

    The draft's content is synced before the draft gets the file's name. A failed draft is removed: it may
    take the space that is missing.

    Raises:
        OSError: The file can't be written, and is as it was.
    """
    draft = path.with_name(f"{path.name}.draft")
    try:
        yield draft
        sync(draft)
        draft.replace(path)
        sync(path.parent)
    except OSError:
        with suppress(OSError):
            draft.unlink()
        raise


def replace_text(path: Path, text: str) -> None:
    """Write a text to a file, or leave the file as it was; it keeps its owner and its permissions.

    Args:
        path: The file, or a symbolic link to it, which stays.
        text: The new text.

    Raises:
        OSError: The file is as it was.
    """
    file = path.resolve()
    with tempfile.NamedTemporaryFile(
        "w", dir=file.parent, newline="", encoding="utf-8", delete=False
    ) as draft:
        try:
            draft.write(text)
            draft.flush()
            os.fsync(draft.fileno())
            if file.exists():
                _keep_owner(file, draft.name)
                shutil.copymode(file, draft.name)
            else:
                os.umask(mask := os.umask(0))
                os.chmod(draft.name, 0o666 & ~mask)
            os.replace(draft.name, file)
        except BaseException:
            with suppress(OSError):
                os.unlink(draft.name)
            raise


def _keep_owner(file: Path, new: str) -> None:
    """Copy the owner and the group of a file, as far as this user may: a service must read the copy."""
    status = file.stat()
    for owner, group in ((-1, status.st_gid), (status.st_uid, -1)):
        with suppress(PermissionError):
            os.chown(new, owner, group)
