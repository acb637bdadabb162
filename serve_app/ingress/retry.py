"""Retry policy for calls to an engine."""

import asyncio
import random

import grpc
from ray.exceptions import RayActorError

from serve_app.api.errors import EngineLostError
from serve_app.ingress.engine_call import EngineGoneError, EngineUnreachedError

TRIES = 4
"""Engines that one request may meet, those included that stop in good order or never take it."""

LONG_S = 300.0
"""Seconds of a stream after which its engine can't have been lost on its account."""

BACKOFF_S = 0.15
"""Mean seconds before the second try; they double with each. A replica that dies is gone by then."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}


def is_lost(error: Exception) -> bool:
    """Return whether a call failed because its replica is gone, not because of what it asked."""
    if isinstance(error, grpc.RpcError):
        return getattr(error, "code", lambda: None)() in _BROKEN
    return isinstance(error, RayActorError | EngineLostError)


def ran_there(error: Exception) -> bool:
    """Return whether a replica was lost while it had the request, by the error of the call.

    Ray Serve itself sends a request on that no replica has accepted; so all errors but those of a replica
    that stops in good order, or that has not answered at all, come from one that had it.
    """
    if isinstance(error, grpc.RpcError):
        return is_lost(error) and getattr(error, "code", lambda: None)() is not grpc.StatusCode.CANCELLED
    return is_lost(error) and not isinstance(error, EngineUnreachedError | EngineGoneError)


async def back_off(tried: int) -> None:
    """Wait before the next try, with jitter: many requests may have lost the same replica.

    Args:
        tried: Tries so far.
    """
    await asyncio.sleep(BACKOFF_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5))
