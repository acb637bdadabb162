"""Entries: what waits in a queue, by itself or as the future of a record."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

from batcher import checks
from batcher.errors import BatcherError

ResultT = TypeVar("ResultT")


class Queued:
    """An entry, as far as a queue and a batcher know it; the base of `Entry`, `Ticket` and `Slot`.

    It has no fields of its own, since a future can't have a base that has some.

    Attributes:
        cost: Cost of its records together, in whole units (tokens).
        priority: Its tier; lower goes first.
        tenant: The name of its tenant.
        deadline: Time on the queue's clock by which it must have been taken; None: any time.
        records: Records that it stands for.
        admitted: Whether it counts against the bounds of the queue, or has been taken.
        submitted_at: Time of its submission, on the batcher's clock.
        refusal: The error that it was refused with.
        space: Future of a caller that waits for it to be admitted.
    """

    __slots__ = ()

    cost: int
    priority: int
    tenant: str
    deadline: float | None
    records: int = 1
    admitted: bool
    submitted_at: float
    refusal: BatcherError | None
    space: asyncio.Future[None] | None
    _place: Any  # the `Backlog` in which it waits

    @property
    def waiting(self) -> bool:
        """Whether it is in the queue: not yet taken, removed or expired."""
        return self._place is not None


@dataclass(slots=True, eq=False)
class Entry(Queued):
    """A record in a `RequestQueue` that is used by itself, or several.

    Args:
        record: Anything; the queue never looks at it.
        cost: Cost of the record, in whole units (tokens).
        priority: Its tier; lower goes first.
        tenant: The name of its tenant.
        deadline: Time on the queue's clock by which it must have been taken.
        records: Records that it stands for; the cost is of all of them.

    Raises:
        ValueError: A number is out of range.
        TypeError: The tenant is not a string.
    """

    record: Any
    cost: int
    priority: int = 0
    tenant: str = "default"
    deadline: float | None = None
    records: int = 1
    admitted: bool = field(default=False, init=False)
    _place: Any = field(default=None, init=False)

    def __post_init__(self) -> None:
        checks.whole("cost", self.cost, 0)
        checks.order(self.priority, self.tenant, self.records)
        if self.deadline is not None:
            checks.instant("deadline", self.deadline)


class Ticket(asyncio.Future[ResultT], Queued):
    """The future of one record; cancelling it gives its place in the queue back at once.

    Future and entry are one object: it is half the work of two that have to know each other, and there is
    no cycle between them to collect.

    Attributes:
        record: The record, until it has ended.
    """

    __slots__ = (
        "_place",
        "_withdraw",
        "admitted",
        "cost",
        "deadline",
        "priority",
        "record",
        "refusal",
        "space",
        "submitted_at",
        "tenant",
    )

    def __init__(
        self,
        withdraw: "Callable[[Ticket[ResultT]], None]",
        loop: asyncio.AbstractEventLoop | None,
        record: Any,
        cost: int,
        priority: int,
        tenant: str,
        deadline: float | None,
        submitted_at: float,
    ) -> None:
        super().__init__(loop=loop)
        self._withdraw = withdraw
        self._place = None
        self.admitted: bool = False
        self.record: Any = record
        self.cost: int = cost
        self.priority: int = priority
        self.tenant: str = tenant
        self.deadline: float | None = deadline
        self.submitted_at: float = submitted_at
        self.refusal: BatcherError | None = None
        self.space: asyncio.Future[None] | None = None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the record: it won't run, unless it runs already. Return whether it had not ended."""
        if not super().cancel(msg):
            return False
        self.record = None
        self._withdraw(self)
        return True

    def fail(self, error: BaseException) -> None:
        """End the record with an error."""
        self.record = None
        self.set_exception(error)
