"""Deletion of contents that are no longer needed."""

from serve_app.batches.content import Content
from serve_app.batches.store import Store


def remove_orphans(store: Store, content: Content) -> int:
    """Delete contents without a file, which a process left that ended in the middle of a change.

    It must not run while a file is being uploaded.

    Returns:
        Their number.
    """
    orphans = content.ids() - store.content_ids()
    for id in orphans:
        content.remove(id)
    return len(orphans)


def remove_expired(store: Store, content: Content, now: int) -> int:
    """Delete files whose time is over; return their number."""
    # First the file, then its content: a file without content would be an error for its reader.
    ids = store.remove_expired(now)
    for id in ids:
        content.remove(id)
    return len(ids)
