"""What the replicas of every kind of model have in common."""

import dataclasses
from collections.abc import Awaitable, Callable

from ray import serve

from batcher import Stats
from serve_app.api.errors import RequestError
from serve_app.api.protocol import JSON
from serve_app.relay.asgi import Head, pack_error

DRAIN_S = 30.0
"""Seconds that a replica which is told to stop gives to the requests that it has admitted."""


async def answer(body: Awaitable[bytes], closing: Callable[[], bytes] = lambda: b"") -> bytes:
    """Return a whole answer as one relay message: the JSON that `body` makes, or why it can't.

    Args:
        body: Makes it.
        closing: Asked when that is done; what it returns goes behind the answer, as for `run_app`.
    """
    try:
        message = Head(200, [(b"content-type", b"application/json")]).pack(await body, whole=True)
    except RequestError as error:
        message = pack_error(error)
    return message + closing()


def replica_stats(stats: Stats, **limits: int) -> JSON:
    """Return what a replica reports of itself.

    Args:
        stats: Its batcher's statistics.
        limits: What it can take, by name.
    """
    replica = serve.get_replica_context().replica_tag
    return {"replica": replica, **limits, "batcher": dataclasses.asdict(stats)}
