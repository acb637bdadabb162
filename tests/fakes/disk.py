"""A disk that fails, and a process that ends between two steps."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch


class KilledError(BaseException):
    """The end of the process; nothing in it may handle this."""


class Life:
    """A process that ends before its n-th step.

    Args:
        at: Number of the step, from 0; None: the process lives on.

    Attributes:
        steps: Names of the steps that the process has made.
    """

    def __init__(self, at: int | None = None) -> None:
        self.steps: list[str] = []
        self._at = at

    def reach(self, step: str) -> None:
        """Make a step, or end."""
        if self._at is not None and len(self.steps) >= self._at:
            raise KilledError(step)
        self.steps.append(step)


def _is(path: Path, handle: int) -> bool:
    return os.readlink(f"/proc/self/fd/{handle}") == str(path)


@contextmanager
def failing_sync(path: Path, *, after: int = 0, times: int | None = None) -> Iterator[None]:
    """Let `fsync` of a file fail with EIO.

    Args:
        path: The file.
        after: Number of calls that succeed first.
        times: Number of calls that fail then; None: all.
    """
    fsync, seen = os.fsync, 0

    def fail(handle: int) -> None:
        nonlocal seen
        if _is(path, handle):
            seen += 1
            if seen > after and (times is None or seen <= after + times):
                raise OSError(errno.EIO, os.strerror(errno.EIO))
        fsync(handle)

    with patch("os.fsync", fail):
        yield


@contextmanager
def full(path: Path, room: int) -> Iterator[None]:
    """Let a disk be full once a file has taken `room` more bytes; the last write is cut short before that."""
    write, left = os.write, room

    def fail(handle: int, data: memoryview) -> int:
        nonlocal left
        if not _is(path, handle):
            return write(handle, data)
        if not left:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        done = write(handle, data[:left])
        left -= done
        return done

    with patch("os.write", fail):
        yield


@contextmanager
def small_files(most: int) -> Iterator[None]:
    """Let no file of this process grow beyond some bytes, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (most, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
