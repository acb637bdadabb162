"""Many records through a batcher, in bounded memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Awaitable, Callable, Iterable
from typing import Any

from batcher.errors import Closed


async def map_records(
    submit: Callable[[Any], Awaitable["asyncio.Future[Any]"]],
    records: Iterable[Any] | AsyncIterable[Any],
    ordered: bool,
    max_pending: int,
    return_exceptions: bool,
) -> AsyncGenerator[Any, None]:
    """Yield the results of `records`, as `DynamicBatcher.map` says; closing it cancels records under way."""
    places = asyncio.Semaphore(max_pending)
    pending: set[asyncio.Future[Any]] = set()
    done: asyncio.Queue[asyncio.Future[Any]] = asyncio.Queue()

    async def take(record: Any) -> None:
        await places.acquire()
        try:
            future = await submit(record)
        except Closed:
            raise
        except Exception as error:
            # This record alone is refused.
            future = asyncio.get_running_loop().create_future()
            future.set_exception(error)
        pending.add(future)
        if ordered:
            done.put_nowait(future)
        else:
            future.add_done_callback(done.put_nowait)

    async def feed() -> None:
        if isinstance(records, AsyncIterable):
            async for record in records:
                await take(record)
        else:
            for record in records:
                await take(record)

    feeder = asyncio.create_task(feed())
    pending.add(feeder)
    feeder.add_done_callback(done.put_nowait)
    try:
        while pending:
            future = await done.get()
            pending.remove(future)
            if future is feeder:
                continue
            try:
                result = await future
            except Exception as error:
                # The caller has asked for errors as results.
                if not return_exceptions:
                    raise
                result = error
            places.release()
            yield result
        await feeder
    finally:
        for future in (feeder, *pending):
            future.cancel()
        await asyncio.wait((feeder,))
