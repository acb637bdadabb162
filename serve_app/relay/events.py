"""Server-sent events of the APIs that an Engine serves."""

import json
import re
from typing import Any

from serve_app.api.errors import ANTHROPIC, RequestError
from serve_app.api.routes import RESPONSES

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's older routes. Clients leave when they have it."""

_NUMBER = re.compile(rb'"sequence_number": ?(\d+)')


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
