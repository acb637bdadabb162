"""Messages that a test's engine sends."""

from typing import Any

from serve_app.api.errors import RequestError
from serve_app.api.headers import Headers
from serve_app.wire import frame
from serve_app.wire.frame import Head, Piece, error_piece, pack
from serve_app.wire.usage import RequestUsage


def message(**fields: Any) -> bytes:
    """Return the message of a piece with such fields."""
    (made,) = pack(Piece(**fields))
    return made


def complete(head: Head, body: bytes) -> bytes:
    """Return a complete answer in one message."""
    return message(head=head, body=body, usage=RequestUsage())


def refused(error: RequestError, path: str = "", headers: Headers | None = None) -> bytes:
    """Return an error as a complete answer with further headers."""
    head, body, *_ = error_piece(error, path, RequestUsage())
    assert head is not None
    return complete(head._replace(headers=[*head.headers, *(headers or [])]), body)


END = message(usage=RequestUsage())
"""The message that ends an answer and brings no more of its body."""

LOST = message(lost=True)
"""The message of an Engine whose engine has died."""

(KEEP_ALIVE,) = pack(frame.KEEP_ALIVE)
"""The message of an Engine that has nothing to send yet."""
