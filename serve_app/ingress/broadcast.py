"""A call of every replica of a model, over its handle."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from serve_app.system import cancellation


async def broadcast(
    handle: Any,
    running: Callable[[], Awaitable[int]],
    method: str,
    *arguments: Any,
    timeout_s: float,
) -> list[Any]:
    """Return the answer of each replica of a model; none if it has no replica now.

    Args:
        handle: The handle of the model's Engine.
        running: Returns the number of its replicas.
        method: The method of the Engine.
        arguments: Its arguments.
        timeout_s: Seconds until all have answered.

    Raises:
        Exception: A replica, or Ray Serve's controller, didn't answer.
    """
    # The limit that Ray offers uses `asyncio.wait_for`: see `pyproject.toml`.
    limit = asyncio.timeout(timeout_s)
    try:
        async with limit:
            # A broadcast to a model without replicas waits for one to start.
            if not await running():
                return []
            answers: list[Any] = await (
                handle.options(_by_reference=True).broadcast(method, *arguments).results_async()
            )
            return answers
    except asyncio.CancelledError:
        if cancellation.is_own():
            raise
        raise ConnectionError("a replica stopped while it was asked") from None
    except TimeoutError:
        if limit.expired():
            raise TimeoutError(f"no answer in {timeout_s:g} s") from None
        raise
