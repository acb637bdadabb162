"""Cancellations of tasks: whose they are, and a wait that loses none."""

import asyncio


def is_own() -> bool:
    """Return whether the running task itself is being cancelled.

    Otherwise a `CancelledError` comes from the awaited call: Ray Serve cancels calls to a replica that it
    removes, and such a call can be retried.
    """
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0


async def wait_for_event(event: asyncio.Event, most_s: float) -> bool:
    """Wait for an event for at most `most_s` seconds; return whether it was set."""
    try:
        # Not `asyncio.wait_for`, which may lose a cancellation: see `pyproject.toml`.
        async with asyncio.timeout(most_s):
            return await event.wait()
    except TimeoutError:
        return False
