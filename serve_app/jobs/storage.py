"""Files and results: changes that touch both the database and the contents.

Each content has a file in the database, belongs to an open batch, or is noted in the database as a content
without a file. So the next start finds the contents that a process left when it ended in the middle of a
change. It deletes no foreign file, and no content of another database.
"""

from array import array
from collections.abc import Iterable, Sequence
from contextlib import suppress

from serve_app.jobs.content import Contents, Draft
from serve_app.jobs.errors import ContentLostError, NotFoundError, TooManyError
from serve_app.jobs.intake import batch_error
from serve_app.jobs.lines import CANCELLED, EXPIRED, unrun
from serve_app.jobs.models import Batch, File, State
from serve_app.jobs.plan import RowPlan, Unsent
from serve_app.jobs.store import Store
from serve_app.settings.batches import BatchesSettings
from serve_app.system.database import DatabaseError, FencedError


def add_file(
    store: Store, content: Contents, draft: Draft, file: File, plan: RowPlan, limits: BatchesSettings
) -> None:
    """Make a draft the content of a new file: afterwards both exist, or neither.

    Args:
        store: The state.
        content: The contents.
        draft: The content of the file.
        file: The file.
        plan: The plan of its rows.
        limits: Limits on the files of its tenant.

    Raises:
        TooManyError: The tenant would exceed its limits.
        OSError: The disk is full, or fails.
        DatabaseError: The database fails.
        FencedError: Another process has taken over the batches.
    """
    store.note_content(file.id)
    try:
        content.keep(draft, file.id)
        store.add_file(file, limits.max_tenant_bytes, limits.max_files, plan)
    except FencedError:
        # The new owner may have looked for the content before it existed.
        content.remove(file.id)
        raise
    except (TooManyError, OSError):
        # A commit that raised an error may still have taken place.
        with suppress(NotFoundError):
            store.remove_file(file.tenant, file.id)
        delete_contents(store, content, [file.id])
        raise


def delete_contents(store: Store, content: Contents, ids: Sequence[str]) -> None:
    """Delete contents that are noted as contents without a file.

    Raises:
        OSError: A content can't be deleted and stays noted; all other contents are deleted.
        DatabaseError: The database fails; the contents stay noted.
    """
    deleted, failed = [], None
    for id in ids:
        try:
            content.remove(id)
        except OSError as error:
            failed = error
        else:
            deleted.append(id)
    if deleted:
        store.forget_contents(deleted)
    if failed:
        raise failed


def delete_noted(store: Store, content: Contents) -> int:
    """Delete the contents and the results that earlier processes left; return the number of contents.

    Must not run while a file is being added.
    """
    store.remove_left_results()
    ids = store.noted_contents()
    # The ids were read before any takeover. A process that takes over later may be adding a file.
    store.check_owner()
    delete_contents(store, content, ids)
    return len(ids)


def remove_expired(store: Store, content: Contents, now: int, limits: BatchesSettings) -> int:
    """Delete expired files and batches, and the oldest results beyond the limit.

    Args:
        store: The state.
        content: The contents.
        now: Seconds since the epoch.
        limits: Limits on the results, and the time that batches are kept.

    Returns:
        The number of deleted files.

    Raises:
        OSError: A content can't be deleted; all other contents are deleted.
    """
    # A file is removed before its content: a reader of a file without content would get an error.
    ids = store.remove_expired(now) + store.remove_excess(limits.max_result_bytes)
    store.remove_expired_batches(now, limits.retention_s)
    delete_contents(store, content, ids)
    return len(ids)


ASKED_LINES = 10_000
"""Rows in one query for rows with a result."""


def unsent(store: Store, batch: Batch, *, by_line: bool = False) -> Unsent:
    """Return the rows of a batch that have no result, in the order of its plan.

    Args:
        store: The state.
        batch: The batch.
        by_line: Use the order of the input instead.

    Raises:
        DatabaseError: The database fails.
    """
    plan = store.plan(batch.input_file)
    left = bytearray(len(plan))
    turns = array("I", bytes(4 * len(plan)))
    for start in range(0, len(plan), ASKED_LINES):
        numbers = range(start, min(len(plan), start + ASKED_LINES))
        finished = store.finished(batch.id, plan[numbers[0]].line, plan[numbers[-1]].line)
        for number in numbers:
            entry = plan[number]
            left[number] = entry.line not in finished
            turns[entry.turn] = number
    rows: Iterable[int] = range(len(plan)) if by_line else turns
    return Unsent(plan, batch.input_file, array("I", (number for number in rows if left[number])))


CLOSING_LINES = 2000
"""Most unsent rows that get their results in one commit when a batch ends."""


def close(store: Store, content: Contents, batch: Batch, now: int) -> None:
    """End a batch with nothing in flight; rows without a result get an error that says why.

    Args:
        store: The state.
        content: The contents.
        batch: A batch that is finalizing or cancelling.
        now: Time of the end, in seconds since the epoch.

    Raises:
        ContentLostError: The rows of its input have changed.
        OSError: The disk is full, or fails.
        DatabaseError: The database fails.
    """
    reason = CANCELLED if batch.state == "cancelling" else EXPIRED
    if batch.completed + batch.failed != batch.total:
        left = unsent(store, batch, by_line=True)
        while left:
            if rows := left.take(content, most=CLOSING_LINES):
                store.record({batch.id: [unrun(batch.id, row, reason) for row in rows]})
    batch = store.batch(batch.id)
    if batch.completed + batch.failed != batch.total:
        raise ContentLostError(f"the content of {batch.input_file} has changed")
    _export(store, content, batch)
    to: State = "completed"
    if batch.state == "cancelling":
        to = "cancelled"
    elif batch.unrun:
        to = "expired"
    store.end(batch.id, to, now, batch.errors)
    store.remove_results(batch.id)


def give_up(store: Store, content: Contents, id: str, reason: str, now: int) -> None:
    """End a batch that has lost a content; its results until then are kept.

    Args:
        store: The state.
        content: The contents.
        id: The batch, with nothing in flight.
        reason: Message about the lost content.
        now: Time of the end, in seconds since the epoch.

    Raises:
        OSError: The disk is full, or fails.
        DatabaseError: The database fails.
    """
    _export(store, content, store.batch(id))
    store.end(id, "failed", now, [batch_error("content_lost", f"{reason}; the results until then are kept")])
    store.remove_results(id)


def _export(store: Store, content: Contents, batch: Batch) -> None:
    """Write the output and the error file of a batch, in the order of its input."""
    for id, size, is_error in (
        (batch.output_file, batch.output_bytes, False),
        (batch.error_file, batch.error_bytes, True),
    ):
        if not size:
            continue
        draft = content.draft()
        try:
            for text in store.results(batch.id, is_error):
                draft.write(text)
            if draft.size != size:
                # A process that has taken over may have ended the batch, and removed its results.
                store.check_owner()
                raise DatabaseError(f"{batch.id}: its results have {draft.size} bytes, and had {size}")
            content.keep(draft, id)
        finally:
            draft.discard()
