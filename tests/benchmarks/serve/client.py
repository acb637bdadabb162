"""A load generator that costs little: on two cores a client takes its time from the server."""

import asyncio
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

PIECE_END = b"0\r\n\r\n"
"""How a chunked answer ends."""


@dataclass(slots=True)
class Answer:
    """One answer as the client saw it.

    Attributes:
        sent_at: When the request left, in seconds on the monotonic clock.
        piece_at: When each piece of the body came.
        status: Of HTTP.
        size: Bytes that came.
    """

    sent_at: float
    piece_at: list[float] = field(default_factory=list)
    status: int = 0
    size: int = 0

    @property
    def ttft_s(self) -> float:
        """Seconds to the first piece of the body."""
        return self.piece_at[0] - self.sent_at

    @property
    def total_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.piece_at[-1] - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two pieces."""
        return [later - earlier for earlier, later in zip(self.piece_at, self.piece_at[1:], strict=False)]


class Connection(asyncio.Protocol):
    """A kept-alive HTTP/1.1 connection that looks at no more of an answer than it must."""

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = b""
        self._left: int | None = None
        self._tail = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def post(self, path: str, body: bytes) -> Answer:
        """Send a request and return its answer once it is whole."""
        assert self._transport
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n\r\n"
        )
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._left, self._tail = b"", None, b""
        self._answer = Answer(time.monotonic())
        self._transport.write(head.encode() + body)
        return await self._done

    def data_received(self, data: bytes) -> None:
        now = time.monotonic()
        answer, done = self._answer, self._done
        assert answer
        assert done
        if not answer.status:
            self._head += data
            head, end, data = self._head.partition(b"\r\n\r\n")
            if not end:
                return
            lines = head.lower().split(b"\r\n")
            answer.status = int(lines[0].split()[1])
            for line in lines[1:]:
                if line.startswith(b"content-length:"):
                    self._left = int(line[15:])
        if data:
            answer.piece_at.append(now)
            answer.size += len(data)
            self._tail = (self._tail + data)[-len(PIECE_END) :]
        whole = self._tail == PIECE_END if self._left is None else answer.size >= self._left
        if whole and not done.done():
            done.set_result(answer)

    def connection_lost(self, error: Exception | None) -> None:
        if self._done and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        """End the connection."""
        assert self._transport
        self._transport.close()


async def run(
    port: int, clients: int, requests: int, request: Callable[[int], tuple[str, Any]]
) -> list[Answer]:
    """Send `requests` requests over `clients` connections, each sending the next when one is answered.

    Args:
        port: Of the server on this machine.
        clients: Connections at once.
        requests: In total.
        request: Returns path and JSON body of the request of a number.

    Raises:
        RuntimeError: An answer was not a success.
    """
    loop = asyncio.get_running_loop()
    prepared = [(path, json.dumps(body).encode()) for path, body in map(request, range(requests))]
    answers: list[Answer] = []

    async def client() -> None:
        _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
        try:
            while prepared:
                answer = await connection.post(*prepared.pop())
                if answer.status != 200:
                    raise RuntimeError(f"the server answered {answer.status}")
                answers.append(answer)
        finally:
            connection.close()

    await asyncio.gather(*(client() for _ in range(clients)))
    return answers
