"""Errors that a batcher raises, and copies of an error for each record of a batch."""

import contextlib
import copy
from collections.abc import Callable
from types import MemberDescriptorType
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
    """Return an equal error that is an object of its own: each `await` writes into the one that it raises."""
    kind = type(error)
    twin: ErrorT | Aborted
    try:
        if kind.__module__ == "builtins":
            # Some keep their state in C, where only their own constructor puts it.
            twin = copy.copy(error)
        else:
            # `__init__` may want other arguments than the `args` it left: go round it.
            twin = kind.__new__(kind, *error.args)
            twin.__dict__.update(error.__dict__)
            # Slots, and the state in C of a builtin base.
            members = [name for name in dir(kind) if isinstance(getattr(kind, name, 0), MemberDescriptorType)]
            for name in ("args", *members):
                if (value := getattr(error, name, name)) is not getattr(twin, name, name):
                    with contextlib.suppress(AttributeError):  # of a group they are read-only
                        BaseException.__setattr__(twin, name, value)
        if "__notes__" in error.__dict__:
            twin.__dict__["__notes__"] = list(error.__dict__["__notes__"])
    except Exception:
        # The class can't be copied; the twin says what the error was, and has its traceback.
        twin = Aborted(f"{kind.__name__}: {described(error, str)}")
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
