"""A call's records through a batcher: which got a result, which are refused and why."""

import asyncio
import time
from collections.abc import Sequence
from typing import Any

from batcher import Aborted, BadResults, BatcherError, DynamicBatcher, Ticket
from serve_app.api.errors import RequestError
from serve_app.api.scheduling import Scheduling
from serve_app.engine import admission

PARTIAL = {400, 408, 422}
"""Errors of one record, which leave the others of a `partial` call as they are."""

BREATH = 64
"""Records that are submitted at a stretch, before others have their turn on the event loop."""

Outcome = Ticket[Any] | RequestError


async def run_records(
    batcher: DynamicBatcher[Any, Any],
    records: Sequence[Any],
    scheduling: Scheduling,
    *,
    field: str,
    partial: bool,
) -> list[Outcome]:
    """Run records and return, for each, its finished ticket or why it has no result.

    The first record is refused when the queue is full, and its call with it; once it has a place, the
    others wait for theirs. So a list longer than the queue can still be served.

    Args:
        batcher: What runs them.
        records: The records, at least one.
        scheduling: The scheduling of their call.
        field: What the list is called in the request, for errors.
        partial: A record that can't be served doesn't fail the others.

    Raises:
        RequestError: The call was refused, or a record of one that isn't partial.
    """
    deadline = scheduling.deadline(time.monotonic())
    batcher.weigh(scheduling.tenant, scheduling.weight)
    outcomes: list[Outcome] = []
    tickets: list[Ticket[Any]] = []
    spoilt = False

    def watch(ticket: asyncio.Future[Any]) -> None:
        nonlocal spoilt
        spoilt = spoilt or ticket.cancelled() or ticket.exception() is not None

    def refuse(index: int, error: BaseException) -> RequestError:
        refusal = explain(error)
        if not partial or refusal.status not in PARTIAL:
            raise refusal.at(f"{field}[{index}]") from error
        return refusal

    try:
        for index, record in enumerate(records):
            try:
                if tickets:
                    ticket = await batcher.submit(
                        record, priority=scheduling.priority, tenant=scheduling.tenant, deadline=deadline
                    )
                else:
                    ticket = batcher.submit_nowait(
                        record, priority=scheduling.priority, tenant=scheduling.tenant, deadline=deadline
                    )
            except Exception as error:
                outcomes.append(refuse(index, error))
                continue
            tickets.append(ticket)
            outcomes.append(ticket)
            ticket.add_done_callback(watch)
            if len(tickets) % BREATH == 0:
                await asyncio.sleep(0)
            if spoilt and not partial:
                break
        if tickets:
            enough = asyncio.ALL_COMPLETED if partial else asyncio.FIRST_EXCEPTION
            await asyncio.wait(tickets, return_when=enough)
        for index, outcome in enumerate(outcomes):
            if isinstance(outcome, Ticket) and outcome.done() and (failure := outcome.exception()):
                outcomes[index] = refuse(index, failure)
        return outcomes
    finally:
        for ticket in tickets:
            ticket.cancel()


def explain(error: BaseException) -> RequestError:
    """Turn what a batcher or its function raised into what a client is told."""
    match error:
        case Aborted() | BadResults():
            return RequestError(500, "internal_error", f"The model failed: {error}")
        case BatcherError():
            return admission.explain(error)
        case _:
            return RequestError(422, "processing_error", f"{type(error).__name__}: {error}")
