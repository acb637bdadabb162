"""Deletion of contents that are no longer needed."""

from serve_app.batches.content import Contents
from serve_app.batches.limits import Limits
from serve_app.batches.store import Store


def remove_orphans(store: Store, content: Contents) -> int:
    """Delete contents without a file, which a process left that ended in the middle of a change.

    It must not run while a file is being uploaded.

    Returns:
        Their number.
    """
    orphans = content.ids() - store.content_ids()
    for id in orphans:
        content.remove(id)
    return len(orphans)


def remove_expired(store: Store, content: Contents, now: int, limits: Limits) -> int:
    """Delete files and batches whose time is over, and old results that are too much.

    Args:
        store: The state.
        content: The contents.
        now: Seconds since the epoch.
        limits: Limits on the results, and the time that batches are kept.

    Returns:
        The number of deleted files.

    Raises:
        OSError: A content can't be deleted; all else is.
    """
    # First the file, then its content: a file without content would be an error for its reader.
    ids = store.remove_expired(now) + store.remove_excess(limits.max_result_bytes)
    failed = None
    for id in ids:
        try:
            content.remove(id)
        except OSError as error:
            # The next start deletes this one.
            failed = error
    store.remove_expired_batches(now, limits.retention_s)
    if failed:
        raise failed
    return len(ids)
