"""Results of rows, written to the files of their batch and committed."""

from collections.abc import Sequence
from contextlib import suppress

from serve_app.batches.content import Contents
from serve_app.batches.errors import ContentLostError, FencedError
from serve_app.batches.plan import plan_id, unsent
from serve_app.batches.rows import CANCELLED, EXPIRED, Result, unrun
from serve_app.batches.states import State
from serve_app.batches.store import Store
from serve_app.batches.stored import Batch, Counts, File
from serve_app.batches.tokens import together
from serve_app.batches.validate import batch_error

CLOSING_LINES = 2000
"""Rows that get their result in one commit when a batch ends without them."""


def adopt_results(store: Store, content: Contents) -> None:
    """Go on with results as an earlier version wrote them; called when the batches are opened.

    Raises:
        OSError: The disk fails.
        DatabaseError: The same for the database.
    """
    for batch in store.open_batches():
        for id in (batch.output_file, batch.error_file):
            content.adopt(id)


def record(store: Store, content: Contents, id: str, results: Sequence[Result]) -> None:
    """Append results to the files of a batch, then commit their rows. May be called again after an error.

    The files are synced before the commit, which holds their new lengths. If the process ends between the
    two, the next append begins at the lengths of the commit before.

    Args:
        store: The state.
        content: The contents.
        id: The batch.
        results: Results of different rows. Those that are committed already are left out.

    Raises:
        ContentLostError: A file of the batch is gone.
        OSError: The disk is full, or fails.
        DatabaseError: The same for the database.
        FencedError: Another process has taken over the batches; nothing is committed.
    """
    batch = store.batch_to_write(id)
    # An error of a commit doesn't say whether it took place.
    finished = store.finished_of(id, [result.line for result in results])
    new = [result for result in results if result.line not in finished]
    if not new:
        return
    output = b"".join(result.text for result in new if not result.is_error)
    errors = b"".join(result.text for result in new if result.is_error)
    failed = sum(result.is_error for result in new)
    never_run = sum(result.is_unrun for result in new)
    tokens = together(result.tokens for result in new)
    counts = Counts(len(new) - failed, failed, never_run, len(output), len(errors), *tokens)
    files = ((batch.output_file, batch.output_bytes, output), (batch.error_file, batch.error_bytes, errors))
    appends = [append for append in files if append[2]]
    try:
        for append in appends:
            content.append(*append)
    except ContentLostError:
        # It isn't lost if another process has completed it meanwhile.
        store.batch_to_write(id)
        raise
    try:
        store.finish(batch, [result.line for result in new], counts)
    except FencedError:
        for id, offset, _ in appends:
            content.take_back(id, offset)
        raise


def close(store: Store, content: Contents, batch: Batch, now: int) -> None:
    """End a batch of which nothing is in flight: rows without a result get one that says why.

    Args:
        store: The state.
        content: The contents.
        batch: A batch that is finalizing or cancelling.
        now: Time of the end, in seconds since the epoch.

    Raises:
        ContentLostError: A file of the batch is gone, or its input has other rows than it had.
        OSError: The disk is full, or fails.
        DatabaseError: The same for the database.
    """
    reason = CANCELLED if batch.state == "cancelling" else EXPIRED
    if batch.completed + batch.failed != batch.total:
        left = unsent(store, content, batch, by_line=True)
        while left:
            if rows := left.take(content, most=CLOSING_LINES):
                record(store, content, batch.id, [unrun(batch.id, row, reason) for row in rows])
    batch = store.batch(batch.id)
    if batch.completed + batch.failed != batch.total:
        raise ContentLostError(f"the content of {batch.input_file} is not what it was")
    content.seal(batch.output_file, batch.output_bytes)
    content.seal(batch.error_file, batch.error_bytes)
    to: State = "completed"
    if batch.state == "cancelling":
        to = "cancelled"
    elif batch.unrun:
        to = "expired"
    # Before the end: afterwards nothing looks for it.
    content.remove(plan_id(batch.id))
    store.end(batch.id, to, now, batch.errors)


def give_up(store: Store, content: Contents, id: str, reason: str, now: int) -> None:
    """End a batch of which a content is gone. Its results until then are kept, see `whole` too.

    Args:
        store: The state.
        content: The contents.
        id: The batch; nothing of it is in flight.
        reason: What is gone.
        now: Time of the end, in seconds since the epoch.

    Raises:
        OSError: The disk is full, or fails.
        DatabaseError: The same for the database.
    """
    errors = [batch_error("content_lost", f"{reason}; the results until then are kept")]
    # First the end: until then, another process may commit more results than are sealed.
    store.end(id, "failed", now, errors)
    batch = store.batch(id)
    for file, size in ((batch.output_file, batch.output_bytes), (batch.error_file, batch.error_bytes)):
        # One may be what is gone.
        with suppress(ContentLostError):
            content.seal(file, size)
    content.remove(plan_id(id))


def whole(content: Contents, file: File) -> bool:
    """Return whether the content of a file is there as a whole.

    Results are sealed now if that failed when their batch was given up.

    Raises:
        OSError: The storage fails.
    """
    if file.purpose != "batch" and content.size(file.id) is None:
        with suppress(ContentLostError):
            content.seal(file.id, file.bytes)
    return content.size(file.id) == file.bytes
