"""Why a run can't go on, and why a row has no result."""


class DriverError(Exception):
    """The run can't go on; the message tells its user what to change."""


class InputError(DriverError):
    """The input can't be read."""


class CommandError(DriverError):
    """The command asks for what the input doesn't have."""


class OutputError(DriverError):
    """The output can't be written, or belongs to another run."""


class RowError(Exception):
    """One row has no result, for good; the run goes on.

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
