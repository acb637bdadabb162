"""Distinguish a cancellation of this task from a cancelled Ray Serve call."""

import asyncio


def is_own() -> bool:
    """Return whether the running task itself is being cancelled.

    Otherwise a `CancelledError` comes from the awaited call: Ray Serve cancels calls to a replica that it
    removes, and such a call can be retried.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
