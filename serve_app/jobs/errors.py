"""Errors of stored files and batches."""


class StoreError(Exception):
    """The folder can't be used as it is; the message says what to change."""


class NotFoundError(Exception):
    """A tenant has no such file or batch."""


class InUseError(Exception):
    """A file can't be deleted, since an open batch reads it."""


class TooManyError(Exception):
    """A tenant has reached a limit."""


class StateError(Exception):
    """A batch can't change from its state to the requested state."""


class RunError(Exception):
    """A run can't continue; the message says why."""


class ContentLostError(RunError):
    """Content that the store lists is missing from the disk."""


class GaveUpError(RunError):
    """The service failed on every try.

    Args:
        tries: Number of tries.
        what: Name of the failed action.
        message: The last failure.
    """

    def __init__(self, tries: int, what: str, message: str) -> None:
        times = "1 try" if tries == 1 else f"{tries} tries"
        super().__init__(f"gave up after {times} of {what}: {message}")
