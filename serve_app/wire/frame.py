"""Pieces of an answer, and the messages that carry them from an Engine to an Ingress.

An answer is a stream of pieces. The first piece has the head, and the last piece the usage, so a complete
answer differs from a broken answer. Each piece leaves the Engine as one message, or as several if it is
large.

A message is a row of frames. A frame is a kind (one byte), the length of its payload (four bytes,
big-endian) and the payload.
"""

import json
import re
import struct
from array import array
from collections.abc import Iterable, Iterator
from enum import IntEnum
from typing import Any, Literal, NamedTuple

from serve_app.api.errors import ANTHROPIC, EngineAwayError, RequestError, error_body
from serve_app.api.headers import Headers
from serve_app.api.routes import RESPONSES
from serve_app.wire.usage import RequestUsage

KEEPALIVE_S = 5.0
"""Seconds without a piece after which an Engine sends a keep-alive.

A machine that loses its power or its network closes no connection: TCP gives up after minutes. So an Ingress
that gets no message at all takes the Engine for lost.
"""

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's older routes. Clients leave when they have it."""

MAX_BODY_BYTES = 2 << 20
"""Maximum bytes of the body in one message; gRPC's own limit on a message is 4 MiB unless it is raised."""

MAX_ANSWER_BYTES = 256 << 20
"""Maximum bytes of an answer that is sent as a whole: it is held in memory several times on its way."""

ResumeMode = Literal["", "tokens", "again"]
"""How a stream that breaks can go on: not at all; from the tokens sent so far; by a second run from its
start, which gives the same text."""

ID = "I"
"""The type code of a token id in an `array`: four bytes."""

_PREFIX = struct.Struct(">BI")
_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


class Kind(IntEnum):
    """The kinds of frame."""

    HEAD = 1
    """Status, headers, resume mode, and whether another Engine may answer, as JSON."""
    TOKEN_IDS = 2
    """Ids of the tokens that the bodies up to here show, as the bytes of an `array`."""
    BODY = 3
    """Bytes of the body."""
    USAGE = 4
    """Tokens, times and outcome of the answer; nothing follows it."""
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
    headers: Headers
    resume: ResumeMode = ""
    elsewhere: bool = False

    @property
    def is_event_stream(self) -> bool:
        """True if the body is a stream of server-sent events."""
        return is_event_stream(self.headers)


class Piece(NamedTuple):
    """A piece of an answer.

    Attributes:
        head: The status line and headers; only the first piece of an answer has them.
        body: Bytes of the body.
        token_ids: Ids of the tokens that came with this body, as the bytes of an `array`.
        usage: Tokens, times and outcome; only the last piece of a complete answer has them.
        lost: The engine has died.
    """

    head: Head | None = None
    body: bytes = b""
    token_ids: bytes = b""
    usage: RequestUsage | None = None
    lost: bool = False


KEEP_ALIVE = Piece()
"""The piece of an Engine that has nothing to send yet."""

LOST = Piece(lost=True)
"""The piece in place of the rest of an answer whose engine has died."""


def is_event_stream(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Return whether an answer with such headers is a stream of server-sent events."""
    return any(
        name.lower() == b"content-type" and value.startswith(b"text/event-stream") for name, value in headers
    )


def to_ids(data: bytes) -> list[int]:
    """Return the token ids in the bytes of an `array`."""
    return array(ID, data).tolist()


def error_piece(error: RequestError, path: str, usage: RequestUsage) -> Piece:
    """Return an error as a complete answer, in the protocol of its route."""
    return Piece(_error_head(error), json.dumps(error_body(error, path)).encode(), usage=usage)


def _error_head(error: RequestError) -> Head:
    headers = [(b"content-type", b"application/json")]
    headers += [(name.encode(), value.encode()) for name, value in error.headers().items()]
    return Head(error.status, headers, elsewhere=isinstance(error, EngineAwayError))


def error_event(error: RequestError, path: str, last: bytes = b"") -> bytes:
    """Return an error as the event that ends a stream, in the protocol of its route.

    Args:
        error: The error.
        path: The route.
        last: The last events that were sent.
    """
    if path.startswith(ANTHROPIC):
        return _event(error.anthropic_body(), name=b"error")
    if path == RESPONSES:
        numbers = _NUMBER.findall(last)
        body = {
            "type": "error",
            "sequence_number": int(numbers[-1]) + 1 if numbers else 0,
            "code": error.type,
            "message": error.message,
            "param": error.param,
            # OpenAI's clients raise what is under this key; the fields beside it are the documented event.
            **error.body(),
        }
        return _event(body, name=b"error")
    return _event(error.body())


def _event(data: dict[str, Any], name: bytes = b"") -> bytes:
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + json.dumps(data).encode() + b"\n\n"


def pack(piece: Piece, path: str = "") -> Iterator[bytes]:
    """Yield a piece as messages that gRPC takes. A whole answer has its length; one too large becomes a 413.

    Args:
        piece: The piece.
        path: The route of the request.
    """
    if piece is KEEP_ALIVE:
        yield _KEEP_ALIVE
        return
    head, body, token_ids, usage, lost = piece
    if head is not None and usage is not None:
        if len(body) > MAX_ANSWER_BYTES:
            refused = _too_large(len(body))
            head, body = _error_head(refused), json.dumps(error_body(refused, path)).encode()
        if not any(name.lower() == b"content-length" for name, _ in head.headers):
            # Clients of HTTP/1.0 can't read chunks.
            head = head._replace(headers=[*head.headers, (b"content-length", b"%d" % len(body))])
    # A view: the body is copied once, into the messages.
    rest = memoryview(body) if len(body) > MAX_BODY_BYTES else body
    while len(rest) > MAX_BODY_BYTES:
        yield _message(head, rest[:MAX_BODY_BYTES], token_ids, None)
        head, token_ids, rest = None, b"", rest[MAX_BODY_BYTES:]
    yield _message(head, rest, token_ids, usage) + (_LOST if lost else b"")


def _message(
    head: Head | None, body: bytes | memoryview, token_ids: bytes, usage: RequestUsage | None
) -> bytes:
    parts: list[bytes | memoryview] = []
    if head is not None:
        text = [[name.decode("latin-1"), value.decode("latin-1")] for name, value in head.headers]
        payload = json.dumps([head.status, text, head.resume, head.elsewhere]).encode()
        parts += (_PREFIX.pack(Kind.HEAD, len(payload)), payload)
    if token_ids:
        parts += (_PREFIX.pack(Kind.TOKEN_IDS, len(token_ids)), token_ids)
    if body:
        parts += (_PREFIX.pack(Kind.BODY, len(body)), body)
    if usage is not None:
        payload = usage.pack()
        parts += (_PREFIX.pack(Kind.USAGE, len(payload)), payload)
    return b"".join(parts)


_KEEP_ALIVE = _PREFIX.pack(Kind.KEEP_ALIVE, 0)
_LOST = _PREFIX.pack(Kind.LOST, 0)


def _too_large(size: int) -> RequestError:
    message = (
        f"The answer has {size} bytes; at most {MAX_ANSWER_BYTES} are sent. Ask for less in one call; for "
        "embeddings, encoding_format=base64 takes a quarter of the bytes"
    )
    return RequestError(413, "request_too_large", message)


def unpack(message: bytes) -> Piece:
    """Read a message.

    Raises:
        ValueError: It isn't one.
    """
    if message == _KEEP_ALIVE:
        return KEEP_ALIVE
    head: Head | None = None
    body = token_ids = b""
    usage: RequestUsage | None = None
    lost = False
    start, end = 0, len(message)
    while start < end:
        if start + _PREFIX.size > end:
            raise ValueError(f"a message of {end} bytes ends inside a frame's prefix")
        kind, length = _PREFIX.unpack_from(message, start)
        start += _PREFIX.size
        if start + length > end:
            raise ValueError(f"a message of {end} bytes ends inside a frame of {length}")
        payload = message[start : start + length]
        start += length
        if kind == Kind.BODY:
            body = payload
        elif kind == Kind.TOKEN_IDS:
            token_ids = payload
        elif kind == Kind.USAGE:
            usage = RequestUsage.unpack(payload)
        elif kind == Kind.HEAD:
            status, text, resume, elsewhere = json.loads(payload)
            headers = [(name.encode("latin-1"), value.encode("latin-1")) for name, value in text]
            head = Head(status, headers, resume, elsewhere)
        elif kind == Kind.LOST:
            lost = True
        elif kind != Kind.KEEP_ALIVE:
            raise ValueError(f"a message has a frame of unknown kind {kind}")
    return Piece(head, body, token_ids, usage, lost)
