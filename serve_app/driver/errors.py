"""Errors that end a run, and errors of single rows."""


class DriverError(Exception):
    """The run can't go on; the message says what to change."""


class InputError(DriverError):
    """The input can't be read."""


class CommandError(DriverError):
    """The command asks for something that the input doesn't have."""


class OutputError(DriverError):
    """The output can't be written, or belongs to another run."""


class RowError(Exception):
    """A row has no result, and no retry would help; the run goes on.

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
