"""Deletion of contents that are no longer needed."""

from serve_app.batches.content import Contents
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


def remove_expired(store: Store, content: Contents, now: int, most_bytes: int) -> int:
    """Delete files whose time is over, and old results that are too much; return their number.

    Args:
        store: The state.
        content: The contents.
        now: Seconds since the epoch.
        most_bytes: Most bytes of all result files of a tenant.
    """
    # First the file, then its content: a file without content would be an error for its reader.
    ids = store.remove_expired(now) + store.remove_excess(most_bytes)
    for id in ids:
        content.remove(id)
    return len(ids)
