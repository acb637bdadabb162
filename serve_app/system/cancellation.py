"""Whose end a `CancelledError` is."""

import asyncio


def is_own() -> bool:
    """Return whether the running task itself is cancelled.

    Otherwise it is a call that it waits for: Ray Serve cancels what is under way to a replica that it takes
    away, and that call can be made again.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
