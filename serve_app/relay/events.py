"""Server-sent events of the APIs that an Engine serves."""

import json
from typing import Any

from serve_app.api.errors import ANTHROPIC, RequestError

DONE = b"data: [DONE]\n\n"
"""The last event of a stream of OpenAI's older routes. Clients leave when they have it."""

RESPONSES = "/v1/responses"


def error_event(error: RequestError, path: str) -> bytes:
    """Return an error as the event that ends a stream, in the protocol of its route."""
    if path.startswith(ANTHROPIC):
        return _event(error.anthropic_body(), name=b"error")
    if path == RESPONSES:
        body = {"type": "error", "code": error.type, "message": error.message, "param": error.param}
        return _event(body, name=b"error")
    return _event(error.body())


def _event(data: dict[str, Any], name: bytes = b"") -> bytes:
    head = b"event: " + name + b"\n" if name else b""
    return head + b"data: " + json.dumps(data).encode() + b"\n\n"
