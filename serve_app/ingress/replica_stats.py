"""Statistics of a model's replicas, over its deployment handle."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.api.protocol import JSON
from serve_app.system import cancellation


async def replica_stats(
    handle: DeploymentHandle[Any], running: Callable[[], Awaitable[int]], timeout_s: float = 5.0
) -> list[JSON]:
    """Return the statistics of each replica of a model.

    Args:
        handle: The handle of the model's Engine.
        running: Returns the number of its replicas.
        timeout_s: Seconds that they have.

    Raises:
        Exception: A replica, or Ray Serve's controller, didn't answer.
    """
    try:
        # A broadcast to a model without replicas waits for one to start.
        if not await running():
            return []
        broadcast = handle.options(_by_reference=True).broadcast("stats")
        found: list[JSON] = await broadcast.results_async(timeout_s=timeout_s)
        return found
    except asyncio.CancelledError:
        if cancellation.is_own():
            raise
        raise ConnectionError("a replica stopped while it was asked") from None
