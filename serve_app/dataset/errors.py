"""Errors that end a run, and errors of single rows."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from serve_app.rows.errors import GaveUpError, RunError


class InputError(RunError):
    """The input can't be read."""


class CommandError(RunError):
    """The command or its input is wrong: the same command fails again."""


class OutputError(RunError):
    """The output can't be written, or belongs to another run."""


class DiskError(OutputError):
    """The disk of the output is full, or fails.

    Args:
        path: The file.
        error: The system's error.
    """

    ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.EROFS})
    """Errors of a disk; any other error is a mistake in the name of a file."""

    def __init__(self, path: Path, error: OSError) -> None:
        super().__init__(
            f"{path}: {error.strerror or error}\n"
            "The rows on the disk are kept. Once the disk takes more, run the same command again: it "
            "continues from there"
        )


def output_error(path: Path, error: OSError) -> OutputError:
    """Return the error of a file that can't be written."""
    if error.errno in DiskError.ERRNOS:
        return DiskError(path, error)
    return OutputError(f"{path}: {error.strerror or error}")


@contextmanager
def written(path: Path) -> Iterator[None]:
    """Return a context that raises the OSError of a write as the OutputError of a file."""
    try:
        yield
    except OSError as error:
        raise output_error(path, error) from None


def gave_up(error: GaveUpError) -> RunError:
    """Return the error of a run that gave up, with advice for its user."""
    return RunError(f"{error}\nWhen the service is back, run the same command again: it continues from here")


class RowError(Exception):
    """A row has no result, and no retry would help; the run continues.

    Args:
        type: A name for programs.
        message: A sentence for people.
    """

    def __init__(self, type: str, message: str) -> None:
        super().__init__(type, message)
        self.type = type
        self.message = message

    def __str__(self) -> str:
        return self.message


class MissingColumnError(RowError):
    """A row doesn't have a column that the command names.

    Args:
        type: A name for programs.
        message: A sentence for people.
        fix: The correction of the command, if no row has the column.
    """

    def __init__(self, type: str, message: str, fix: str) -> None:
        super().__init__(type, message)
        self.fix = fix
