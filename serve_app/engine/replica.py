"""Parts that the replicas of every kind of model share."""

import dataclasses
from collections.abc import Awaitable

from ray import serve

from batcher import Stats
from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.relay.frame import Head, pack, pack_error
from serve_app.relay.usage import RequestUsage

DRAIN_S = 30.0
"""Seconds that a replica which stops gives to the requests that it has admitted."""


async def answer(body: Awaitable[bytes], usage: RequestUsage) -> bytes:
    """Return a complete answer as one relay message: the JSON that `body` gives, or its `RequestError`.

    Args:
        body: Makes the JSON.
        usage: Filled meanwhile.
    """
    try:
        content = await body
    except RequestError as error:
        return pack_error(error, usage=usage)
    return pack(head=Head(200, [(b"content-type", b"application/json")]), body=content, usage=usage)


def routing_stats(tokens: int) -> dict[str, int]:
    """Return a replica's report to those that choose between replicas.

    Ray Serve sends a report that has changed to every process with a handle, so the tokens are rounded to
    three binary digits: a steady load changes nothing.

    Args:
        tokens: Tokens that it holds, as their callers estimate them.
    """
    step = 1 << max(0, tokens.bit_length() - 3)
    return {"tokens": (tokens + step // 2) // step * step}


def replica_stats(stats: Stats, **limits: int) -> JSON:
    """Return a replica's entry in `/stats`.

    Args:
        stats: Its batcher's statistics.
        limits: Its limits, by name.
    """
    replica = serve.get_replica_context().replica_tag
    return {"replica": replica, **limits, "batcher": dataclasses.asdict(stats)}
