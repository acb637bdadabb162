"""The entry: a record that waits in a queue, and the future of its result."""

import asyncio
from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Any, TypeVar

from batcher import checks
from batcher.checks import LARGEST, PRIORITIES
from batcher.costs import whole_cost

ResultT = TypeVar("ResultT")
_init_future = asyncio.Future.__init__  # faster than by super()


@dataclass(slots=True, eq=False, repr=False)
class Entry(asyncio.Future[ResultT]):
    """A record in a queue, or several, and the future of the result.

    Future and entry are one object: two that know each other are twice the work, and a cycle to collect. In a
    `RequestQueue` that is used by itself there is no event loop, and an entry is no more than its place.
    """

    record: Any  # the record, until it has ended; the queue never looks at it
    cost: int  # of its records together, in whole units (tokens); a fraction is rounded up
    priority: int = 0  # its tier; lower goes first
    tenant: str = "default"  # the name of its tenant
    deadline: float | None = None  # time on the queue's clock by which it must have been taken
    records: int = 1  # how many it stands for
    loop: InitVar[asyncio.AbstractEventLoop | None] = None  # that of the future; None: it is only an entry
    withdraw: Callable[[Any], None] | None = None  # is told when it is cancelled
    submitted_at: float = 0.0  # time of its submission, on the batcher's clock
    admitted: bool = field(default=False, init=False)  # counts against the queue's bounds, or has been taken
    space: asyncio.Future[None] | None = field(default=None, init=False)  # wakes who waits for its admission
    # The account of its tenant, its neighbours in the backlog, its place by arrival, and its deadline's item.
    _place: Any = field(init=False)
    _previous: Any = field(init=False)
    _next: Any = field(default=None, init=False)
    _order: int = field(init=False)
    _item: Any = field(default=None, init=False)

    def __post_init__(self, loop: asyncio.AbstractEventLoop | None) -> None:
        if loop is not None:
            _init_future(self, loop=loop)
        if type(self.cost) is not int or not 0 <= self.cost <= LARGEST:
            self.cost = whole_cost("cost", self.cost)
        if type(self.priority) is not int or not -PRIORITIES <= self.priority <= PRIORITIES:
            checks.whole("priority", self.priority, -PRIORITIES, PRIORITIES)
        if type(self.tenant) is not str:
            checks.tenant(self.tenant)
        if self.records != 1 or type(self.records) is not int:
            checks.whole("records", self.records, 1)
        if self.deadline is not None:
            checks.instant("deadline", self.deadline)

    @property
    def waiting(self) -> bool:
        """True while it is in a queue: not yet taken, removed or expired."""
        return self._next is not None

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel it: it won't run, unless it runs already. Return whether it had not ended."""
        # A class with slots is made anew, so super() doesn't find it.
        if not asyncio.Future.cancel(self, msg):
            return False
        self.record = None
        if self.withdraw is not None:
            self.withdraw(self)
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
