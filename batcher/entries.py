"""Entries: what waits in a queue. For a queue alone, as the future of a record, or as a slot of a window."""

import asyncio
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self, TypeVar

from batcher import checks
from batcher.errors import BatcherError

ResultT = TypeVar("ResultT")


class Queued:
    """An entry, as far as a queue knows it; the base of `Entry`, `Ticket` and `Slot`.

    It has no fields of its own, since a future can't have a base that has some.

    Attributes:
        cost: Cost of the record, in whole units (tokens).
        priority: Its tier; lower goes first.
        tenant: The name of its tenant.
        deadline: Time on the queue's clock by which it must have been taken; None: any time.
        records: Records that it stands for.
        admitted: Whether it counts against the bounds of the queue, or has been taken.
    """

    __slots__ = ()

    cost: int
    priority: int
    tenant: str
    deadline: float | None
    records: int = 1
    admitted: bool
    _place: Any  # the `Backlog` in which it waits

    @property
    def waiting(self) -> bool:
        """Whether it is in the queue: not yet taken, removed or expired."""
        return self._place is not None


@dataclass(slots=True, eq=False)
class Entry(Queued):
    """A record in a `RequestQueue` that is used by itself.

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
        checks.priority(self.priority)
        checks.tenant(self.tenant)
        if self.deadline is not None:
            checks.instant("deadline", self.deadline)
        checks.whole("records", self.records, 1)


class Submitted(Queued):
    """An entry of a batcher; the base of `Ticket` and `Slot`.

    Attributes:
        submitted_at: Time of its submission, on the batcher's clock.
        refusal: The error that it was refused with.
        space: Future of a caller that waits for it to be admitted.
    """

    __slots__ = ()

    submitted_at: float
    refusal: BatcherError | None
    space: asyncio.Future[None] | None


class Ticket(asyncio.Future[ResultT], Submitted):
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


@dataclass(frozen=True, slots=True)
class SlotCalls:
    """The functions of a batcher that a slot calls.

    Attributes:
        enter: Puts a slot into the queue and waits until it starts.
        leave: Takes a slot out of the window, or of the queue; the error is what ended its block.
        first_token: Takes in that the record of a slot has its first token.
        outgrown: Reserves more for a slot that has produced more than was reserved for it.
    """

    enter: "Callable[[Slot], Coroutine[Any, Any, None]]"
    leave: "Callable[[Slot, BaseException | None], None]"
    first_token: "Callable[[Slot], None]"
    outgrown: "Callable[[Slot], None]"


@dataclass(slots=True, eq=False)
class Slot(Submitted):
    """The place of one record in the window, or of several; `async with` waits for it and gives it back.

    Attributes:
        cost: What it holds of the capacity now.
        charged: What its tenant was charged for it.
        running: Whether it is in the window.
        owner: The task that holds it.
        started_at: Time at which it started.
        first_at: Time of its first token; 0 before.
        waited_s: Seconds from submission to start.
        output_tokens: Tokens reported so far.
        turn: Future of the caller that waits for it to start.
    """

    _calls: SlotCalls
    cost: int
    priority: int
    tenant: str
    deadline: float | None
    wait: bool
    prompt_tokens: int | None
    max_tokens: int | None
    records: int = 1
    output_tokens: int = 0
    submitted_at: float = 0.0
    started_at: float = 0.0
    first_at: float = 0.0
    waited_s: float = 0.0
    charged: int = 0
    used: bool = False
    admitted: bool = False
    running: bool = False
    owner: asyncio.Task[Any] | None = None
    refusal: BatcherError | None = None
    space: asyncio.Future[None] | None = None
    turn: asyncio.Future[None] | None = None
    _place: Any = None

    async def __aenter__(self) -> Self:
        await self._calls.enter(self)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._calls.leave(self, error)

    def release(self) -> None:
        """Give the place back before the block ends; more than once does no harm.

        A caller that waits to enter the slot gets `Aborted`.
        """
        self._calls.leave(self, None)

    def first_token(self) -> None:
        """Tell that the first token is there, for goals to be held against."""
        self._calls.first_token(self)

    def report(self, output_tokens: int) -> None:
        """Tell how many tokens the record has produced so far.

        With `max_utilization` a record that outgrows what was reserved for it reserves more, even beyond
        the capacity: nothing new starts until the window has space again.

        Args:
            output_tokens: Tokens in all, of all its records, not since the last report.

        Raises:
            ValueError: It is not a whole number of at least 0.
        """
        if type(output_tokens) is not int or not 0 <= output_tokens <= checks.LARGEST:
            checks.whole("output_tokens", output_tokens, 0)
        self.output_tokens = output_tokens
        if self.prompt_tokens is not None and self.running and self.prompt_tokens + output_tokens > self.cost:
            self._calls.outgrown(self)
