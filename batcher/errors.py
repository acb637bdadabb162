"""Errors that a batcher raises, and copies of an error for each record of a batch."""

import copy
from collections.abc import Callable
from typing import TypeVar

LATE = "the deadline passed before the record could start"
ErrorT = TypeVar("ErrorT", bound=BaseException)


class BatcherError(Exception):
    """Base of everything that a batcher refuses or gives up."""


class QueueFull(BatcherError):  # noqa: N818 - the field's word, as in `asyncio.QueueFull`
    """There is no space for the record now; it may come back after `retry_after_s`.

    `what` is the bound that was met, `max_queue_size` or `max_queue_cost`, and `limit` its value.
    """

    def __init__(self, what: str, limit: int, retry_after_s: float) -> None:
        super().__init__(what, limit, retry_after_s)
        self.what = what
        self.limit = limit
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"the queue is full: {self.what}={self.limit}; retry in {self.retry_after_s:.2f} s"


class Expired(BatcherError, TimeoutError):  # noqa: N818
    """The record's deadline passed before it could start."""


class Oversize(BatcherError, ValueError):  # noqa: N818
    """More than `limit`, which may ever run at once: a record's `cost`, where `oversize` is "reject".

    With `what`, the argument that sets the limit, `cost` is how many records a slot has.
    """

    def __init__(self, cost: int, limit: int, what: str | None = None) -> None:
        super().__init__(cost, limit, what)
        self.cost = cost
        self.limit = limit
        self.what = what

    def __str__(self) -> str:
        if self.what is not None:
            return f"{self.cost} records must run together, at most {self.what}={self.limit} can"
        return f"the record costs {self.cost}, at most {self.limit} is allowed"


class Closed(BatcherError, RuntimeError):  # noqa: N818
    """The batcher has not been started, or is stopping."""


class Aborted(BatcherError, RuntimeError):  # noqa: N818
    """The record was cut short, other than by an ordinary error or by `stop`."""


class BadResults(BatcherError, ValueError):  # noqa: N818
    """`process_fn` did not return one result per record."""


def separate(error: ErrorT) -> ErrorT | Aborted:
    """Return a copy of an error: each `await` writes into the error that it raises.

    An error whose class can't be copied is described by an `Aborted`, of which it is the cause.
    """
    twin: ErrorT | Aborted
    try:
        twin = copy.copy(error)
        if twin.args != error.args or twin is error:
            raise TypeError
    except Exception:
        # A copy may fail in any way: the error is the cause of what stands for it.
        twin = Aborted(f"{type(error).__name__}: {described(error, str)}")
        twin.__cause__ = error
        return twin
    if notes := getattr(error, "__notes__", None):
        twin.__notes__ = list(notes)
    for name in ("__cause__", "__context__", "__suppress_context__"):
        # The class may forbid assignments, as a frozen dataclass does.
        BaseException.__setattr__(twin, name, getattr(error, name))
    return twin.with_traceback(error.__traceback__)


def described(error: BaseException, text: Callable[[BaseException], str] = repr) -> str:
    """Return the text of an error; its own method for that may raise too."""
    try:
        return text(error)
    except Exception:
        # Of an error whose text can't be made there is a name at least.
        return object.__repr__(error)
