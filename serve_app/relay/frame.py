"""Frames: the encoding of an answer on its way from an Engine to an Ingress.

A relay message is one or more frames. A frame is a kind (one byte), the length of its payload (four bytes,
big-endian) and the payload. The first message of an answer begins with a HEAD; the last one ends with USAGE,
so a complete answer differs from one that broke off.
"""

import json
import struct
from collections.abc import Iterator
from enum import IntEnum
from typing import NamedTuple

from serve_app.api.errors import EngineAwayError, RequestError, error_body
from serve_app.relay.resume import ResumeMode
from serve_app.relay.usage import RequestUsage

_PREFIX = struct.Struct(">BI")

MAX_BODY_BYTES = 2 << 20
"""Most bytes of the body in one message; gRPC's own limit on a message is 4 MiB unless it is raised."""

MAX_ANSWER_BYTES = 256 << 20
"""Most bytes of an answer that is sent as a whole: it is held in memory several times on its way."""


class Kind(IntEnum):
    """The kinds of frame."""

    HEAD = 1
    """Status, headers, resume mode, and whether another Engine may answer, as JSON."""
    TOKEN_IDS = 2
    """Ids of the tokens that the bodies up to here show, as the bytes of an `array`."""
    BODY = 3
    """Bytes of the body."""
    USAGE = 4
    """Tokens and times of the answer; nothing follows it."""
    KEEP_ALIVE = 5
    """Nothing to send yet."""
    LOST = 6
    """The engine has died; the answer ends here, incomplete."""


class Head(NamedTuple):
    """The status line and headers of an answer.

    Attributes:
        status: The HTTP status.
        headers: Names and values.
        resume: How the answer, a stream, could go on in another Engine.
        elsewhere: This Engine can't serve the request, and another one may.
    """

    status: int
    headers: list[tuple[bytes, bytes]]
    resume: ResumeMode = ""
    elsewhere: bool = False

    @property
    def is_event_stream(self) -> bool:
        """True if the body is a stream of server-sent events."""
        return any(
            name.lower() == b"content-type" and value.startswith(b"text/event-stream")
            for name, value in self.headers
        )

    def pack(self) -> bytes:
        """Return the payload of a HEAD frame."""
        text = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in self.headers]
        return json.dumps([self.status, text, self.resume, self.elsewhere]).encode()

    @classmethod
    def unpack(cls, payload: bytes) -> "Head":
        """Read the payload of a HEAD frame."""
        status, text, resume, elsewhere = json.loads(payload)
        headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in text]
        return cls(status, headers, resume, elsewhere)


class Piece(NamedTuple):
    """One decoded relay message.

    Attributes:
        head: The status line and headers; only the first piece of an answer has them.
        body: Bytes of the body.
        token_ids: Ids of the tokens that came with this body, as the bytes of an `array`.
        usage: Tokens and times of the answer; only the last piece of a complete answer has them.
        lost: The engine has died.
    """

    head: Head | None = None
    body: bytes = b""
    token_ids: bytes = b""
    usage: RequestUsage | None = None
    lost: bool = False


def _frame(kind: Kind, payload: bytes = b"") -> bytes:
    return _PREFIX.pack(kind, len(payload)) + payload


KEEP_ALIVE = _frame(Kind.KEEP_ALIVE)
"""The message of an Engine that has nothing to send yet."""

LOST = _frame(Kind.LOST)
"""The message that stands for the rest of an answer whose engine has died."""


def pack(
    *,
    head: Head | None = None,
    body: bytes | memoryview = b"",
    token_ids: bytes = b"",
    usage: RequestUsage | None = None,
) -> bytes:
    """Return a relay message; see `Piece` for the arguments."""
    parts: list[bytes | memoryview] = []
    if head is not None:
        parts.append(_frame(Kind.HEAD, head.pack()))
    if token_ids:
        parts.append(_frame(Kind.TOKEN_IDS, token_ids))
    if body:
        parts += (_PREFIX.pack(Kind.BODY, len(body)), body)
    if usage is not None:
        parts.append(_frame(Kind.USAGE, usage.pack()))
    return b"".join(parts)


def with_headers(message: bytes, headers: list[tuple[bytes, bytes]]) -> bytes:
    """Return the first message of an answer with more headers; another message as it is."""
    kind, length = _PREFIX.unpack_from(message)
    if kind != Kind.HEAD:
        return message
    end = _PREFIX.size + length
    head = Head.unpack(message[_PREFIX.size : end])
    return _frame(Kind.HEAD, head._replace(headers=[*head.headers, *headers]).pack()) + message[end:]


def split(message: bytes, path: str) -> Iterator[bytes]:
    """Yield a relay message as several that gRPC takes; an answer that is too large becomes a 413.

    Args:
        message: The message.
        path: The route of the request.
    """
    if len(message) <= MAX_BODY_BYTES:
        yield message
        return
    frames = {kind: (start, end) for kind, start, end in _frames(message)}
    # A view: the body is copied once, into the parts.
    body = memoryview(message)[slice(*frames.pop(Kind.BODY, (0, 0)))]
    head, _, token_ids, usage, _ = unpack(
        b"".join(message[start - _PREFIX.size : end] for start, end in frames.values())
    )
    if head is not None and usage is not None:
        if len(body) > MAX_ANSWER_BYTES:
            yield pack_error(_too_large(len(body)), path, usage)
            return
        if not any(name.lower() == b"content-length" for name, _ in head.headers):
            # Clients of HTTP/1.0 can't read chunks.
            head = head._replace(headers=[*head.headers, (b"content-length", str(len(body)).encode())])
    for start in range(0, len(body) or 1, MAX_BODY_BYTES):
        part = body[start : start + MAX_BODY_BYTES]
        last = start + MAX_BODY_BYTES >= len(body)
        yield pack(head=head, body=part, token_ids=token_ids, usage=usage if last else None)
        head, token_ids = None, b""


def _too_large(size: int) -> RequestError:
    message = (
        f"The answer has {size} bytes; at most {MAX_ANSWER_BYTES} are sent. Ask for less in one call; for "
        "embeddings, encoding_format=base64 takes a quarter of the bytes"
    )
    return RequestError(413, "request_too_large", message)


def pack_error(error: RequestError, path: str = "", usage: RequestUsage | None = None) -> bytes:
    """Return the answer to a request on a route that was refused: one message, complete."""
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    body = json.dumps(error_body(error, path)).encode()
    head = Head(error.status, headers, elsewhere=isinstance(error, EngineAwayError))
    return pack(head=head, body=body, usage=usage or RequestUsage())


def _frames(message: bytes) -> Iterator[tuple[int, int, int]]:
    """Yield the kind of each frame, and where its payload begins and ends.

    Raises:
        ValueError: It is no relay message.
    """
    start, end = 0, len(message)
    while start < end:
        if start + _PREFIX.size > end:
            raise ValueError(f"a relay message of {end} bytes ends inside a frame's prefix")
        kind, length = _PREFIX.unpack_from(message, start)
        start += _PREFIX.size
        if start + length > end:
            raise ValueError(f"a relay message of {end} bytes ends inside a frame of {length}")
        yield kind, start, start + length
        start += length


def unpack(message: bytes) -> Piece:
    """Read a relay message.

    Raises:
        ValueError: It isn't one.
    """
    head: Head | None = None
    body = token_ids = b""
    usage: RequestUsage | None = None
    lost = False
    for kind, start, end in _frames(message):
        if kind == Kind.BODY:
            body = message[start:end]
        elif kind == Kind.TOKEN_IDS:
            token_ids = message[start:end]
        elif kind == Kind.USAGE:
            usage = RequestUsage.unpack(message[start:end])
        elif kind == Kind.HEAD:
            head = Head.unpack(message[start:end])
        elif kind == Kind.LOST:
            lost = True
        elif kind != Kind.KEEP_ALIVE:
            raise ValueError(f"a relay message has a frame of unknown kind {kind}")
    return Piece(head, body, token_ids, usage, lost)
