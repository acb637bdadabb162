"""Files and their contents, which are added and deleted together.

A content has a file in the database, is that of an open batch, or is noted there as one without a file. So
what a process left that ended in the middle of a change is known at the next start, and nothing else is
deleted: no file of somebody else, and no content of another database.
"""

from collections.abc import Sequence
from contextlib import suppress

from serve_app.batches.content import Contents, Draft
from serve_app.batches.errors import DatabaseError, FencedError, NotFoundError, TooManyError
from serve_app.batches.limits import Limits
from serve_app.batches.store import Store
from serve_app.batches.stored import File


def add_file(store: Store, content: Contents, draft: Draft, file: File, limits: Limits) -> None:
    """Make a draft the content of a new file: afterwards both are there, or neither.

    Args:
        store: The state.
        content: The contents.
        draft: The content of the file.
        file: The file.
        limits: Limits on the files of its tenant.

    Raises:
        TooManyError: The tenant would have more.
        OSError: The disk is full, or fails.
        DatabaseError: The same for the database.
        FencedError: Another process has taken over the batches.
    """
    store.note_content(file.id)
    try:
        content.keep(draft, file.id)
        store.add_file(file, limits.max_tenant_bytes, limits.max_files)
    except FencedError:
        # The new owner may have looked for it before it was there.
        content.remove(file.id)
        raise
    except (TooManyError, OSError, DatabaseError):
        # An error of a commit doesn't say whether it took place.
        with suppress(NotFoundError):
            store.remove_file(file.tenant, file.id)
        delete_contents(store, content, [file.id])
        raise


def delete_contents(store: Store, content: Contents, ids: Sequence[str]) -> None:
    """Delete contents that are noted as those without a file.

    Raises:
        OSError: One can't be deleted: it stays noted; all others are deleted.
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
    """Delete what earlier processes left, and return the number of contents.

    It must not run while a file is being added.
    """
    ids = store.noted_contents()
    delete_contents(store, content, ids)
    return len(ids)


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
    store.remove_expired_batches(now, limits.retention_s)
    delete_contents(store, content, ids)
    return len(ids)
