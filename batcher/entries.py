"""The future of one record, which is its place in the queue as well."""

import asyncio
from typing import Any, Protocol, TypeVar

from batcher.fair_share import Queued

ResultT = TypeVar("ResultT")
TicketT_contra = TypeVar("TicketT_contra", contravariant=True)


class Issuer(Protocol[TicketT_contra]):
    """The batcher that issues tickets, as far as a ticket needs it."""

    def _cancelled(self, ticket: TicketT_contra) -> None:
        """Give back the place of a ticket that was cancelled."""


class Ticket(asyncio.Future[ResultT], Queued):
    """The future of one record; cancelling it gives its place in the queue back at once.

    Future and queue entry are one object: it is half the work of two that have to know each other, and
    there is no cycle between them to collect.

    Attributes:
        record: The record, until it has ended.
        submitted_at: When it was submitted, on the batcher's clock.
    """

    __slots__ = ("_issuer", "_lane", "cost", "deadline", "priority", "record", "submitted_at", "tenant")

    def __init__(
        self,
        issuer: "Issuer[Ticket[ResultT]]",
        loop: asyncio.AbstractEventLoop,
        record: Any,
        cost: int,
        priority: int,
        tenant: str,
        deadline: float | None,
        submitted_at: float,
    ) -> None:
        super().__init__(loop=loop)
        self._issuer = issuer
        self._lane = None
        self.record = record
        self.cost = cost
        self.priority = priority
        self.tenant = tenant
        self.deadline = deadline
        self.submitted_at = submitted_at

    def cancel(self, msg: Any | None = None) -> bool:
        """Cancel the record: it won't run, unless it runs already. Return whether it had not ended."""
        if not super().cancel(msg):
            return False
        self.record = None
        self._issuer._cancelled(self)
        return True

    def fail(self, error: BaseException) -> None:
        """End the record with an error."""
        self.record = None
        self.set_exception(error)
