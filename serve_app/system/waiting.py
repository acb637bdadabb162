"""Waits that have a limit."""

import asyncio


async def wait_for_event(event: asyncio.Event, most_s: float) -> bool:
    """Wait for an event, at most so many seconds; return whether it came."""
    try:
        # Not `asyncio.wait_for`, which may lose a cancellation: see `pyproject.toml`.
        async with asyncio.timeout(most_s):
            return await event.wait()
    except TimeoutError:
        return False
