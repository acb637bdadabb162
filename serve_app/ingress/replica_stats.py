"""Statistics of deployments, over their handles."""

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

from ray.serve.handle import DeploymentHandle

from serve_app.api.protocol import JSON
from serve_app.ingress.broadcast import broadcast
from serve_app.system import cancellation

TIMEOUT_S = 5.0
"""Seconds that a replica has to answer."""


async def replica_stats(
    handle: DeploymentHandle[Any], running: Callable[[], Awaitable[int]], timeout_s: float = TIMEOUT_S
) -> list[JSON]:
    """Return the statistics of each replica of a model.

    Args:
        handle: The handle of the model's Engine.
        running: Returns the number of its replicas.
        timeout_s: Seconds that they have.

    Raises:
        Exception: A replica, or Ray Serve's controller, didn't answer.
    """
    return await broadcast(handle, running, "stats", timeout_s=timeout_s)


async def start_replica(handle: Any) -> None:
    """Wait for a replica of a model; one is started if there is none.

    Args:
        handle: The handle of the model's Engine.
    """
    await handle.options(method_name="stats", _by_reference=False).remote()


async def deployment_stats(
    name: str, handle: Any, running: Callable[[], Awaitable[int]], method: str = "stats"
) -> JSON:
    """Return the answer of one replica of a deployment, its statistics, or `error`: why there is none.

    Args:
        name: The deployment.
        handle: Its handle.
        running: Returns the number of its replicas.
        method: The method that is called.
    """
    try:
        # Without a replica, a call would wait for one.
        if not await running():
            return {"error": f"the {name} deployment has no replica now"}
        async with asyncio.timeout(TIMEOUT_S):
            found: JSON = await handle.options(method_name=method, _by_reference=False).remote()
        return found
    except asyncio.CancelledError:
        if cancellation.is_own():
            raise
        return {"error": "the replica stopped while it was asked"}
    except Exception as error:
        # The caller gets the reason; what the replica raises, Ray Serve has logged there with its stack.
        return {"error": str(error) or type(error).__name__}
