"""Bodies of requests that are small by their nature."""

import asyncio
from collections.abc import Callable

from starlette.requests import ClientDisconnect, Request

from serve_app.api.errors import RequestError

BOM = b"\xef\xbb\xbf"
"""Mark before a text in UTF-8, as editors on Windows write it; it is no part of the text."""

BODY_S = 60.0
"""Seconds until such a body has to be here."""


async def small_body(request: Request, most: int, count: Callable[[int], None] = lambda size: None) -> bytes:
    """Return the body of a request, without a byte order mark.

    Args:
        request: The request.
        most: Most bytes that it may have.
        count: Called with the bytes of each piece. An error that it raises ends the request.

    Raises:
        RequestError: 413, it has more; 408, it comes too slowly; 400, it ends early.
    """
    body = bytearray()
    try:
        async with asyncio.timeout(BODY_S):
            async for piece in request.stream():
                if len(body) + len(piece) > most:
                    message = f"The body is larger than the limit of {most} bytes"
                    raise RequestError(413, "request_too_large", message)
                count(len(piece))
                body += piece
    except TimeoutError:
        message = f"The body was not here after {BODY_S:g} s"
        raise RequestError(408, "timeout_error", message) from None
    except ClientDisconnect:
        # The client is gone; the error ends the request.
        raise RequestError(400, "invalid_request_error", "The body ended early") from None
    return bytes(body.removeprefix(BOM))
