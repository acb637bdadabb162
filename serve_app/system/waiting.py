"""Waits with a time limit."""

import asyncio


async def wait_for_event(event: asyncio.Event, most_s: float) -> bool:
    """Wait for an event for at most `most_s` seconds; return whether it was set."""
    try:
        # Not `asyncio.wait_for`, which may lose a cancellation: see `pyproject.toml`.
        async with asyncio.timeout(most_s):
            return await event.wait()
    except TimeoutError:
        return False
