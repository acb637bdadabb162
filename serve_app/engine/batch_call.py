"""Calls that carry a list of records, and the rules that hold for each of their records."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from batcher import Aborted, BadResults, BatcherError, DynamicBatcher, Entry
from serve_app.api.errors import RequestError
from serve_app.api.protocol import PromptError
from serve_app.api.scheduling import Scheduling
from serve_app.engine.door import refusal_of

PARTIAL = {400, 408, 422}
"""Errors of one record, which don't affect the other records of a `partial` call."""

RECORDS_PER_TURN = 64
"""Records that are submitted before other tasks get their turn on the event loop."""


class BatchCall:
    """The rules of a call that carries a list of records.

    The first record is refused when the queue is full, and its call with it. Once it has a place, the other
    records wait for theirs: so a list longer than the queue can be served.

    Args:
        field: The name of the list in the request, for errors.
        partial: A record that can't be served becomes an entry of `errors`, and doesn't fail the call.

    Attributes:
        tickets: The tickets of its records, once they are run; None for a record that failed.
    """

    def __init__(self, field: str, *, partial: bool) -> None:
        self._field = field
        self._partial = partial
        self._errors: list[PromptError] = []
        self._first: int | None = None
        self.tickets: list[Entry[Any] | None] = []

    def wait(self, index: int) -> bool:
        """Return whether a record that is to be queued waits when the queue is full."""
        if self._first is None:
            self._first = index
        return index != self._first

    def fail(self, index: int, error: RequestError) -> None:
        """Note that a record can't be served.

        Raises:
            RequestError: The error fails the whole call; it names the record.
        """
        if not self._partial or error.status not in PARTIAL:
            raise error.at(f"{self._field}[{index}]") from error
        if index == self._first:
            self._first = None
        self._errors.append(PromptError(index=index, type=error.type, message=error.message))

    @property
    def errors(self) -> list[PromptError] | None:
        """The records that failed, in order; None for a call that isn't partial."""
        return sorted(self._errors, key=lambda error: error.index) if self._partial else None


async def run_records(
    batcher: DynamicBatcher[Any, Any], records: Sequence[Any], scheduling: Scheduling, call: BatchCall
) -> list[Entry[Any] | None]:
    """Run the records of a call and return their finished tickets; None for a record that failed.

    Args:
        batcher: Runs the records.
        records: The records, at least one.
        scheduling: How their call is scheduled.
        call: The rules of their call.

    Raises:
        RequestError: The call was refused, or a record failed and the call isn't partial.
    """
    whole = call.errors is None
    deadline = scheduling.deadline(time.monotonic())
    batcher.weigh(scheduling.tenant, scheduling.weight)
    tickets = call.tickets
    failed = False

    def note_failure(ticket: asyncio.Future[Any]) -> None:
        nonlocal failed
        failed = failed or ticket.cancelled() or ticket.exception() is not None

    async def submit(index: int, record: Any) -> Entry[Any]:
        priority, tenant = scheduling.priority, scheduling.tenant
        if call.wait(index):
            return await batcher.submit(record, priority=priority, tenant=tenant, deadline=deadline)
        return batcher.submit_nowait(record, priority=priority, tenant=tenant, deadline=deadline)

    try:
        for index, record in enumerate(records):
            try:
                ticket = await submit(index, record)
            except Exception as error:
                # The caller gets it: a refusal, or what the function's own measure of a record raises.
                call.fail(index, record_error(error))
                tickets.append(None)
            else:
                tickets.append(ticket)
                ticket.add_done_callback(note_failure)
            if len(tickets) % RECORDS_PER_TURN == 0:
                await asyncio.sleep(0)
            if failed and whole:
                break
        if running := [ticket for ticket in tickets if ticket is not None]:
            enough = asyncio.FIRST_EXCEPTION if whole else asyncio.ALL_COMPLETED
            await asyncio.wait(running, return_when=enough)
        for index, done in enumerate(tickets):
            if done is not None and done.done() and (failure := done.exception()):
                call.fail(index, record_error(failure))
                tickets[index] = None
        return tickets
    finally:
        for each in tickets:
            if each is not None:
                each.cancel()


def record_error(error: BaseException) -> RequestError:
    """Return the client's error for an error of a batcher or of its function."""
    match error:
        case Aborted() | BadResults():
            return RequestError(500, "internal_error", f"The model failed: {error}")
        case BatcherError():
            return refusal_of(error)
        case _:
            return RequestError(422, "processing_error", f"{type(error).__name__}: {error}")
