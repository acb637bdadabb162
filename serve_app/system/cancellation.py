"""Tells a cancellation of this task from one that Ray Serve caused."""

import asyncio


def is_own() -> bool:
    """Return whether the running task itself is being cancelled.

    If it isn't, a `CancelledError` comes from the call that it awaits: Ray Serve cancels the calls to a
    replica that it removes, and such a call can be made again.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
