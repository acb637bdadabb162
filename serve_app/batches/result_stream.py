"""Results of a batch as a stream, while they are written."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from serve_app.batches.content import Contents
from serve_app.batches.errors import ContentLostError
from serve_app.batches.states import ENDED
from serve_app.batches.stored import Batch

LOOK_S = 0.5
"""Seconds between two looks for more."""

Look = Callable[[], Awaitable[Batch]]


def written(batch: Batch, errors: bool) -> tuple[str, int]:
    """Return the id of the output or the error file of a batch, and its committed bytes."""
    return (batch.error_file, batch.error_bytes) if errors else (batch.output_file, batch.output_bytes)


async def result_stream(
    content: Contents, batch: Batch, look: Look, errors: bool, start: int = 0, look_s: float = LOOK_S
) -> AsyncIterator[bytes]:
    """Yield the output or the error file of a batch up to its end, as far as it is committed.

    Args:
        content: The contents.
        batch: The batch.
        look: Returns the batch as it is now.
        errors: The error file instead of the output.
        start: Bytes to leave out, which the reader has already.
        look_s: Seconds between two looks for more.

    Raises:
        ContentLostError: The file is gone.
    """
    lost = False
    while True:
        id, size = written(batch, errors)
        try:
            pieces: Iterator[bytes] = content.pieces(id, size, start) if start < size else iter(())
            while (piece := await asyncio.to_thread(next, pieces, b"")) != b"":
                start += len(piece)
                yield piece
            lost = False
        except (ContentLostError, FileNotFoundError):
            # In object storage, the end of a batch replaces the parts of a file by one object.
            if lost:
                raise
            lost = True
            continue
        if batch.state in ENDED:
            return
        await asyncio.sleep(look_s)
        batch = await look()
