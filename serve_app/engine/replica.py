"""Parts that the replicas of every kind of model share."""

import logging
import os
from collections.abc import AsyncGenerator, Awaitable, Sequence
from contextlib import aclosing
from functools import reduce
from typing import Any

import ray
from ray import serve
from ray.serve.exceptions import RayServeException

from batcher import BatchStats, ContinuousStats
from serve_app.api.errors import FAULT, RequestError, internal_error
from serve_app.api.headers import request_id
from serve_app.api.protocol import JSON
from serve_app.ledger.calls import OTHER, CallBook, Sums
from serve_app.relay.frame import KEEP_ALIVE, Head, pack, pack_error, split, with_headers
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import RequestUsage
from serve_app.stats import replica_body

logger = logging.getLogger("ray.serve")

DRAIN_S = 30.0
"""Seconds that a replica which stops gives to the requests that it has admitted."""


async def answer(body: Awaitable[bytes], usage: RequestUsage, request: RelayRequest) -> bytes:
    """Return a complete answer as one relay message: the JSON that `body` gives, or its error.

    Args:
        body: Makes the JSON.
        usage: Filled meanwhile.
        request: The request.
    """
    try:
        content = await body
    except RequestError as error:
        return pack_error(error, usage=usage)
    except Exception as error:
        logger.exception(FAULT, request_id(request.headers), request.path)
        return pack_error(internal_error(error), usage=usage)
    return pack(head=Head(200, [(b"content-type", b"application/json")]), body=content, usage=usage)


async def parts_of(
    answer: AsyncGenerator[bytes, None], path: str, headers: list[tuple[bytes, bytes]]
) -> AsyncGenerator[bytes, None]:
    """Yield the relay messages of an answer as they are sent: with more headers, and none too large for gRPC.

    Args:
        answer: The messages.
        path: The route.
        headers: The headers to add.
    """
    async with aclosing(answer) as messages:
        async for message in messages:
            if headers and message != KEEP_ALIVE:
                message, headers = with_headers(message, headers), []
            for part in split(message, path):
                yield part


def replica_tag() -> str:
    """Return the name of this replica; empty outside Ray Serve."""
    try:
        return str(serve.get_replica_context().replica_tag)
    except RayServeException:
        return ""


def replica_name() -> str:
    """Return the name of this replica's actor; empty outside Ray Serve."""
    try:
        return str(serve.get_replica_context().replica_id.to_full_id_str())
    except RayServeException:
        return ""


def device_name() -> str:
    """Return a name of this replica's device: replicas with the same one share its memory."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "")
    return f"{ray.get_runtime_context().get_node_id()}:{visible}"


def usage_stats(book: CallBook, tenants: int) -> JSON:
    """Return the usage in a replica's entry of `/stats`: sums since its start.

    Args:
        book: Its calls.
        tenants: Most tenants with sums of their own; those with less share `other`.
    """
    sums = book.by_tenant()
    # Work that nobody has asked for, such as the warm-up, has no tenant.
    own = sums.pop("", Sums())
    largest = sorted(sums, key=lambda name: -_size(sums[name]))
    shown = {name: sums[name] for name in largest[:tenants] if name != OTHER}
    if rest := [sums[name] for name in sums if name not in shown]:
        shown[OTHER] = reduce(Sums.plus, rest)
    return {
        "tenants": {name: each._asdict() for name, each in shown.items()},
        "own": own._asdict(),
    }


def _size(sums: Sums) -> int:
    return sums.prompt + sums.output + sums.cost


def routing_stats(tokens: int, adapters: Sequence[str] = (), *, asleep: bool = False) -> dict[str, Any]:
    """Return a replica's report to those that choose between replicas.

    Ray Serve sends a report that has changed to every process with a handle, so the tokens are rounded to
    three binary digits: a steady load changes nothing.

    Args:
        tokens: Tokens that it holds, as their callers estimate them.
        adapters: Adapters that are loaded.
        asleep: Whether it sleeps, while another model has its device.
    """
    step = 1 << max(0, tokens.bit_length() - 3)
    report: dict[str, Any] = {"tokens": (tokens + step // 2) // step * step}
    return report | ({"adapters": sorted(adapters)} if adapters else {}) | ({"asleep": 1} if asleep else {})


def replica_stats(stats: ContinuousStats | BatchStats, **more: Any) -> JSON:
    """Return a replica's entry in `/stats`.

    Args:
        stats: Its batcher's statistics.
        more: Other fields of `ReplicaStats`.
    """
    return replica_body(serve.get_replica_context().replica_tag, stats, **more)
