"""Many records through a batcher, in bounded memory."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable
from typing import TypeVar

from batcher.errors import Closed

RecordT = TypeVar("RecordT")
ResultT = TypeVar("ResultT")


async def map_records(
    submit: Callable[[RecordT], Awaitable["asyncio.Future[ResultT]"]],
    records: Iterable[RecordT] | AsyncIterable[RecordT],
    ordered: bool,
    max_pending: int,
    return_exceptions: bool,
) -> AsyncGenerator[ResultT | Exception, None]:
    """Yield the results of `records`, as `DynamicBatcher.map` says.

    An error, or closing the iterator, cancels what was submitted and has not been yielded.
    """
    places = asyncio.Semaphore(max_pending)
    pending: set[asyncio.Future[ResultT]] = set()
    done: asyncio.Queue[asyncio.Future[ResultT] | None] = asyncio.Queue()

    async def feed() -> None:
        try:
            async for record in _each(records):
                await places.acquire()
                future = await _submitted(submit, record)
                pending.add(future)
                if ordered:
                    done.put_nowait(future)
                else:
                    future.add_done_callback(done.put_nowait)
        finally:
            done.put_nowait(None)

    feeder = asyncio.create_task(feed())
    fed = False
    try:
        while pending or not fed:
            future = await done.get()
            if future is None:
                fed = True
                continue
            result: ResultT | Exception
            try:
                result = await future
            except Exception as error:
                if not return_exceptions:
                    raise
                result = error
            pending.remove(future)
            places.release()
            yield result
        await feeder
    finally:
        feeder.cancel()
        for future in pending:
            future.cancel()
        await asyncio.wait((feeder,))


async def _each(records: Iterable[RecordT] | AsyncIterable[RecordT]) -> AsyncIterator[RecordT]:
    if isinstance(records, AsyncIterable):
        async for record in records:
            yield record
    else:
        for record in records:
            yield record


async def _submitted(
    submit: Callable[[RecordT], Awaitable["asyncio.Future[ResultT]"]], record: RecordT
) -> "asyncio.Future[ResultT]":
    """Submit one record; if it alone is refused, return a future that says so."""
    try:
        return await submit(record)
    except Closed:
        raise
    except Exception as error:
        refused: asyncio.Future[ResultT] = asyncio.get_running_loop().create_future()
        refused.set_exception(error)
        return refused
