"""Count of the service's faults: errors that a process logs with their stack, which an alert watches."""

import logging

from serve_app.api.errors import EngineLostError, RequestError
from serve_app.telemetry.catalogue import FAULTS
from serve_app.telemetry.meters import Meters


class FaultCount(logging.Handler):
    """Counts errors with a stack in Ray Serve's log, including Serve's errors about failed calls.

    Serve also logs an error if a method of a handle raises a `RequestError`, which isn't a fault.

    Args:
        logger: The log.

    Attributes:
        total: Faults since the start.
    """

    def __init__(self, logger: str = "ray.serve") -> None:
        super().__init__(logging.ERROR)
        self.total = 0
        self._logger = logging.getLogger(logger)
        self._logger.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Count a record."""
        error = record.exc_info[1] if record.exc_info else None
        if error is not None and not isinstance(error, RequestError | EngineLostError):
            self.total += 1

    def report(self, meters: Meters) -> None:
        """Record the count as a metric."""
        meters.count(FAULTS, self.total)

    def stop(self) -> None:
        """Stop counting."""
        self._logger.removeHandler(self)
