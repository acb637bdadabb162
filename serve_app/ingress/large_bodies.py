"""Work on large bodies, done beside the event loop and one body after the other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from serve_app.ingress.value_count import count_values

LARGE_BYTES = 1 << 20
"""A body with more bytes is large: a look into it takes milliseconds, into one of 32 MiB up to a second."""

VALUE_BYTES = 200
"""Bytes of a text that take as long as one value of JSON."""

T = TypeVar("T")

_thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")


def weight(body: bytes) -> int:
    """Return the bytes of a body, or of a text that takes as long: 150 kB may have 100,000 values."""
    size = len(body)
    return size if size > LARGE_BYTES else max(size, VALUE_BYTES * count_values(body))


async def look(size: int, call: Callable[[], T]) -> T:
    """Return the result of a call that looks into a body.

    The parsers keep the interpreter's lock, but each for a part of the work only; other requests get their
    turns in between, and no more than one large body is looked into at once.

    Args:
        size: Bytes of the body, or its `weight`.
        call: Looks into it.
    """
    if size <= LARGE_BYTES:
        return call()
    waiting = [call]
    try:
        return await asyncio.get_running_loop().run_in_executor(_thread, lambda: waiting.pop()())
    finally:
        # The thread keeps what it is to do until its turn, also for a client that has left.
        waiting.clear()
