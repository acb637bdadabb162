"""Bodies that come in pieces, by calls beside the call with their request.

A deployment handle carries messages, and no process may have a large body in memory as a whole. So the caller
makes an id, begins the request with the id, and sends the pieces one after the other. Each call returns once
the piece has room, so the caller sends no faster than the pieces are read.
"""

import asyncio

from starlette.types import Message

MAX_WAITING = 2
"""Pieces that wait for their reader."""

BEGIN_S = 20.0
"""Seconds that a piece waits for its request, which comes by another call."""


class Upload:
    """A body that is coming.

    Attributes:
        ended: Whether its last piece was read.
    """

    def __init__(self) -> None:
        self.ended = False
        self._pieces: list[tuple[bytes, bool]] = []
        self._closed = False
        self._changed = asyncio.Condition()

    async def put(self, data: bytes, last: bool) -> bool:
        """Add a piece once there is room; return False if nobody reads it any more."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._closed or len(self._pieces) < MAX_WAITING)
            if self._closed:
                return False
            self._pieces.append((data, last))
            self._changed.notify_all()
        return True

    async def receive(self) -> Message:
        """Return the next piece as an ASGI message."""
        async with self._changed:
            await self._changed.wait_for(lambda: self._pieces)
            data, last = self._pieces.pop(0)
            self.ended = last
            self._changed.notify_all()
        return {"type": "http.request", "body": data, "more_body": not last}

    async def close(self) -> None:
        """Take no more pieces."""
        async with self._changed:
            self._closed = True
            self._pieces.clear()
            self._changed.notify_all()


class Uploads:
    """The bodies that are coming, by id.

    Args:
        begin_s: Seconds that the first piece waits for its request.
    """

    def __init__(self, begin_s: float = BEGIN_S) -> None:
        self._begin_s = begin_s
        self._uploads: dict[str, Upload] = {}
        self._opened = asyncio.Condition()

    async def open(self, id: str) -> Upload:
        """Return the body of a request that has begun."""
        upload = Upload()
        async with self._opened:
            self._uploads[id] = upload
            self._opened.notify_all()
        return upload

    async def close(self, id: str) -> None:
        """End a body, whether all of it has come or not."""
        if upload := self._uploads.pop(id, None):
            await upload.close()

    async def put(self, id: str, data: bytes, last: bool) -> bool:
        """Add a piece to a body once there is room.

        Args:
            id: The id of the body.
            data: The piece.
            last: Whether this is the last piece.

        Returns:
            Whether the piece was taken; if not, the request has its answer already.
        """
        try:
            async with asyncio.timeout(self._begin_s), self._opened:
                await self._opened.wait_for(lambda: id in self._uploads)
                upload = self._uploads[id]
        except TimeoutError:
            return False
        return await upload.put(data, last)
