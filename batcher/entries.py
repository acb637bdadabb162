"""The entry: what waits in a queue, and the future of its result."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from batcher import checks
from batcher.checks import LARGEST, PRIORITIES
from batcher.costs import whole_cost

ResultT = TypeVar("ResultT")

_init_future = asyncio.Future.__init__  # faster than by super()


class Entry(asyncio.Future[ResultT]):
    """A record in a queue, or several, and the future of the result.

    Future and entry are one object: it is half the work of two that have to know each other, and there is
    no cycle between them to collect. In a `RequestQueue` that is used by itself there is no event loop, and
    an entry is no more than its place.

    Attributes:
        record: The record, until it has ended; the queue never looks at it.
        cost: Cost of its records together, in whole units (tokens).
        priority: Its tier; lower goes first.
        tenant: The name of its tenant.
        deadline: Time on the queue's clock by which it must have been taken; None: any time.
        records: Records that it stands for.
        admitted: Whether it counts against the bounds of the queue, or has been taken.
        submitted_at: Time of its submission, on the batcher's clock.
        space: Future of a caller that waits for it to be admitted.

    Args:
        record: See above, as all that follows; a cost that is a fraction is rounded up.
        loop: The event loop of the future; None: it is only an entry.
        withdraw: Told when it is cancelled.

    Raises:
        ValueError: A number is out of range.
        TypeError: The tenant is not a string.
    """

    __slots__ = (
        "_item",
        "_next",
        "_place",
        "_previous",
        "_withdraw",
        "admitted",
        "cost",
        "deadline",
        "priority",
        "record",
        "records",
        "space",
        "submitted_at",
        "tenant",
    )

    def __init__(
        self,
        record: Any,
        cost: int,
        priority: int = 0,
        tenant: str = "default",
        deadline: float | None = None,
        records: int = 1,
        loop: asyncio.AbstractEventLoop | None = None,
        withdraw: "Callable[[Any], None] | None" = None,
        submitted_at: float = 0.0,
    ) -> None:
        if loop is not None:
            _init_future(self, loop=loop)
        if type(cost) is not int or not 0 <= cost <= LARGEST:
            cost = whole_cost("cost", cost)
        if type(priority) is not int or not -PRIORITIES <= priority <= PRIORITIES:
            checks.whole("priority", priority, -PRIORITIES, PRIORITIES)
        if type(tenant) is not str:
            checks.tenant(tenant)
        if records != 1 or type(records) is not int:
            checks.whole("records", records, 1)
        if deadline is not None:
            checks.instant("deadline", deadline)
        self.record: Any = record
        self.cost: int = cost
        self.priority: int = priority
        self.tenant: str = tenant
        self.deadline: float | None = deadline
        self.records: int = records
        self.admitted: bool = False
        self.submitted_at: float = submitted_at
        self.space: asyncio.Future[None] | None = None
        self._withdraw = withdraw
        # The backlog in which it waits, or has waited last, the neighbours there, and its deadline's item.
        self._place: Any = None
        self._item: Any = None
        self._previous: Any = None
        self._next: Any = None

    @property
    def waiting(self) -> bool:
        """True while it is in a queue: not yet taken, removed or expired."""
        return self._next is not None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it: it won't run, unless it runs already. Return whether it had not ended."""
        if not super().cancel(msg):
            return False
        self.record = None
        if self._withdraw is not None:
            self._withdraw(self)
        return True

    def fail(self, error: BaseException) -> None:
        """End it with an error."""
        self.record = None
        self.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        """Wake the caller that waits for it to be admitted."""
        if self.space is not None and not self.space.done():
            self.space.set_result(None)

    def __repr__(self) -> str:
        return f"<Entry of {self.tenant!r}, cost {self.cost}, priority {self.priority}>"
