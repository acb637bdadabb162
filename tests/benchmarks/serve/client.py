"""Load generator with little CPU time, since on two cores a client competes with the server."""

import asyncio
import json
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

PIECE_END = b"0\r\n\r\n"
"""End of a chunked answer."""

TAIL = 2048
"""Last bytes of an answer that are kept, with the usage."""

_COUNT = re.compile(rb'"completion_tokens":\s*(\d+)')
_FRAME = re.compile(rb"\r\n[0-9a-fA-F]+\r\n")
"""Boundary of two HTTP chunks; JSON text has no bare line ends."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request.

    Attributes:
        path: Path of the request.
        body: JSON body.
        tokens: Output tokens of a complete answer.
        prompts: Number of prompts.
    """

    path: str
    body: Any
    tokens: int
    prompts: int = 1


@dataclass(slots=True)
class Answer:
    """One answer as the client sees it; times are seconds on the monotonic clock.

    Attributes:
        tokens: Requested output tokens.
        prompts: Number of answered prompts.
        sent_at: When the request was sent.
        ended_at: When the last byte arrived.
        first_at: When the first token arrived; 0: not a stream.
        first_events: Events in the first piece of a stream.
        piece_at: When each piece of the body arrived.
        status: HTTP status.
        retry_after_s: Seconds from the header Retry-After; 0: none.
        size: Received bytes.
        tail: Last bytes of the body.
    """

    tokens: int
    prompts: int
    sent_at: float
    ended_at: float = 0.0
    first_at: float = 0.0
    first_events: int = 0
    piece_at: list[float] = field(default_factory=list)
    status: int = 0
    retry_after_s: int = 0
    size: int = 0
    tail: bytes = b""

    @property
    def ttft_s(self) -> float:
        """Seconds to the first token."""
        return self.first_at - self.sent_at

    @property
    def tpot_s(self) -> float:
        """Seconds per token after the first."""
        return (self.ended_at - self.first_at) / max(self.tokens - 1, 1)

    @property
    def total_s(self) -> float:
        """Seconds to the end of the answer."""
        return self.ended_at - self.sent_at

    @property
    def gaps_s(self) -> list[float]:
        """Seconds between two pieces."""
        return [later - earlier for earlier, later in zip(self.piece_at, self.piece_at[1:], strict=False)]

    def check(self) -> None:
        """Check the status and the number of tokens.

        Raises:
            RuntimeError: The answer is not a success, or has another number of tokens than requested.
        """
        tail = _FRAME.sub(b"", self.tail)
        if self.status != 200:
            raise RuntimeError(f"the server answered {self.status}: {tail.decode(errors='replace')}")
        counts = _COUNT.findall(tail)
        if not counts:
            raise RuntimeError(f"the answer has no usage: {tail.decode(errors='replace')}")
        if int(counts[-1]) != self.tokens:
            raise RuntimeError(f"the answer has {int(counts[-1])} tokens, not {self.tokens}")


class Connection(asyncio.Protocol):
    """A persistent HTTP/1.1 connection that parses as little of an answer as possible.

    Attributes:
        closing: Whether the server closes it after the current answer.
    """

    def __init__(self) -> None:
        self._transport: asyncio.Transport | None = None
        self._answer: Answer | None = None
        self._done: asyncio.Future[Answer] | None = None
        self._head = b""
        self._left: int | None = None
        self._stream = False
        self._events = 0
        self.closing = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    async def post(self, path: str, body: bytes, answer: Answer, header: str = "") -> Answer:
        """Send a request, with a further header line if given; return its complete answer."""
        assert self._transport
        head = (
            f"POST {path} HTTP/1.1\r\nhost: bench\r\ncontent-type: application/json\r\n"
            f"content-length: {len(body)}\r\n{header}\r\n"
        )
        self._done = asyncio.get_running_loop().create_future()
        self._head, self._left, self._stream, self._events = b"", None, False, 0
        self._answer = answer
        answer.sent_at = time.monotonic()
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
                elif line.startswith(b"content-type: text/event-stream"):
                    self._stream = True
                elif line.startswith(b"retry-after:"):
                    answer.retry_after_s = int(line[12:])
                elif line == b"connection: close":
                    self.closing = True
        if data:
            answer.piece_at.append(now)
            answer.size += len(data)
            answer.tail = (answer.tail + data)[-TAIL:]
            if self._stream and not answer.first_at:
                self._look_for_token(answer, data, now)
        whole = answer.tail.endswith(PIECE_END) if self._left is None else answer.size >= self._left
        if whole and not done.done():
            answer.ended_at = now
            done.set_result(answer)

    def _look_for_token(self, answer: Answer, data: bytes, now: float) -> None:
        """Note the time of the first token: it is in the second event; the first only has the role."""
        self._events += data.count(b"data:")
        answer.first_events = answer.first_events or self._events
        if self._events >= 2:
            answer.first_at = now

    def connection_lost(self, error: Exception | None) -> None:
        self.closing = True
        if self._done and not self._done.done():
            self._done.set_exception(error or ConnectionError("the server closed the connection"))

    def close(self) -> None:
        """Close the connection."""
        assert self._transport
        self._transport.close()


class Connections:
    """Pool of connections to a server on this machine.

    Args:
        port: The server's port.
    """

    def __init__(self, port: int) -> None:
        self._port = port
        self._free: list[Connection] = []

    async def post(self, path: str, body: bytes, answer: Answer, header: str = "") -> Answer:
        """Send a request over a free connection, or a new one; see `Connection.post`."""
        # A server closes idle connections.
        while self._free and self._free[-1].closing:
            self._free.pop()
        idle = bool(self._free)
        if idle:
            connection = self._free.pop()
        else:
            loop = asyncio.get_running_loop()
            _, connection = await loop.create_connection(Connection, "127.0.0.1", self._port)
        try:
            await connection.post(path, body, answer, header)
        except BaseException as error:
            # It was cancelled, and the rest of the answer may still come.
            connection.close()
            if idle and not answer.status and isinstance(error, ConnectionError):
                # The server closed it while the request was on its way.
                return await self.post(path, body, answer, header)
            raise
        if connection.closing:
            connection.close()
        else:
            self._free.append(connection)
        return answer

    def close(self) -> None:
        """Close the free connections."""
        for connection in self._free:
            connection.close()


async def run(port: int, connections: int, requests: Sequence[Request]) -> list[Answer]:
    """Send requests over a number of connections; each sends the next when one is answered.

    Args:
        port: The server's port.
        connections: Number of connections.
        requests: Requests, in the order of sending.

    Raises:
        RuntimeError: An answer was not a success, or too short.
    """
    loop = asyncio.get_running_loop()
    # Bodies are encoded in advance, so that the client only sends and reads the clock under load.
    prepared = [(json.dumps(one.body).encode(), one) for one in reversed(requests)]
    answers: list[Answer] = []

    async def client() -> None:
        while prepared:
            _, connection = await loop.create_connection(Connection, "127.0.0.1", port)
            try:
                while prepared and not connection.closing:
                    body, request = prepared.pop()
                    answer = Answer(request.tokens, request.prompts, 0.0)
                    answers.append(await connection.post(request.path, body, answer))
            finally:
                connection.close()

    await asyncio.gather(*(client() for _ in range(connections)))
    for answer in answers:
        answer.check()
    return answers
