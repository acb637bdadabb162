"""Server-sent events of the OpenAI API."""

import json

from serve_app.api.errors import RequestError

DONE = b"data: [DONE]\n\n"
"""The last event of a stream. Clients leave when they have it."""


def error_event(error: RequestError) -> bytes:
    """Return an error as the event that ends a stream."""
    return f"data: {json.dumps(error.body())}\n\n".encode()
