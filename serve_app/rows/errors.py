"""Errors with which a run ends."""


class RunError(Exception):
    """A run can't continue; the message says why."""


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
