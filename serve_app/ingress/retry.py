"""Retry policy for calls to an engine."""

import asyncio
import random

import grpc
from ray.exceptions import RayActorError

from serve_app.ingress.engine_call import EngineLostError

TRIES = 4
"""Engines that one request may meet. Bounded, since the request may be what they die of."""

BACKOFF_S = 0.15
"""Mean seconds before the second try; they double with each. A replica that dies is gone by then."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}


def is_lost(error: Exception) -> bool:
    """Return whether a call failed because its replica is gone, not because of what it asked."""
    if isinstance(error, grpc.RpcError):
        return getattr(error, "code", lambda: None)() in _BROKEN
    return isinstance(error, RayActorError | EngineLostError)


async def back_off(tried: int) -> None:
    """Wait before the next try, with jitter: many requests may have lost the same replica.

    Args:
        tried: Tries so far.
    """
    await asyncio.sleep(BACKOFF_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5))
