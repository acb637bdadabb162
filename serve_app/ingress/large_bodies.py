"""Work on large bodies, done beside the event loop and one body after the other."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

LARGE_BYTES = 1 << 20
"""A body with more bytes is large: a look into it takes milliseconds, into one of 32 MiB up to a second."""

T = TypeVar("T")

_thread = ThreadPoolExecutor(1, thread_name_prefix="large-bodies")


async def look(size: int, call: Callable[[], T]) -> T:
    """Return the result of a call that looks into a body.

    The parsers keep the interpreter's lock, but each for a part of the work only; other requests get their
    turns in between, and no more than one large body is looked into at once.

    Args:
        size: Bytes of the body.
        call: Looks into it.
    """
    if size <= LARGE_BYTES:
        return call()
    return await asyncio.get_running_loop().run_in_executor(_thread, call)
