"""Middleware between the HTTP server and Ray Serve: a filter of headers, and answers for old clients.

Ray Serve reads some headers by itself, before the Ingress sees the request, and trusts them: the id goes into
the access log and to the engine as it is, and a value that is not UTF-8 ends as a 500. The variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH` puts the middleware in front of it.

The HTTP server, uvicorn, trusts `X-Forwarded-For` of peers on the same machine, HAProxy among them, and
puts an address from it in place of the peer's. That is off: which proxies count is a setting of the Ingress.
"""

import os
import re

from starlette.middleware import Middleware
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

REQUEST_ID = b"x-request-id"
_ID = re.compile(rb"[\x21-\x7e]{1,128}")

NEVER_LEAVES = b"x-request-disconnect-disabled"
"""With this header, Serve doesn't notice that a client has left, and the engine would go on."""

WATCHED = frozenset({REQUEST_ID, NEVER_LEAVES})
READ_BY_SERVE = frozenset(
    {
        b"x_request_timeout_seconds",
        b"x_session_id",
        b"serve_multiplexed_model_id",
        b"traceparent",
        b"tracestate",
    }
)
"""Headers that Serve decodes, which takes "-" for "_" in some of them."""


class HeaderFilter:
    """ASGI middleware that drops harmful headers, and sends no chunks to clients of HTTP/1.0.

    - an id that is not 1 to 128 printable ASCII characters, for which Serve then makes one, and a second id;
    - the wish that work goes on for a client that has left;
    - what Serve would read and is no ASCII.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = scope.get("headers", ())
        for name, value in headers:
            if name in WATCHED or not value.isascii():
                scope["headers"] = _harmless(headers)
                break
        await self._app(scope, receive, unchunked(send) if scope.get("http_version") == "1.0" else send)


def middlewares() -> list[Middleware]:
    """Return the middleware that Serve puts in front of itself.

    Serve calls this before it starts uvicorn, which reads from the environment whom it trusts: nobody.
    """
    os.environ["FORWARDED_ALLOW_IPS"] = ""
    return [Middleware(HeaderFilter)]


def unchunked(send: Send) -> Send:
    """Return a function that sends an answer without a length as it is; the end of the connection ends it.

    uvicorn sends such an answer in chunks, whatever the client's version: a client of HTTP/1.0 takes their
    sizes for content.

    Args:
        send: The method of uvicorn's cycle. Chunks stay where it is another function.
    """
    cycle = getattr(send, "__self__", None)
    if not isinstance(cycle, RequestResponseCycle):
        return send
    endless = False

    async def sent(message: Message) -> None:
        nonlocal endless
        if message["type"] == "http.response.start":
            endless = all(name.lower() != b"content-length" for name, _ in message.get("headers", ()))
            if endless:
                cycle.chunked_encoding = False
        elif endless:
            # uvicorn compares the body with this length.
            cycle.expected_content_length = len(message.get("body", b"")) + message.get("more_body", False)
        await send(message)

    return sent


def _harmless(headers: list[tuple[bytes, bytes]]) -> list[tuple[bytes, bytes]]:
    kept = []
    has_id = False
    for name, value in headers:
        if name == REQUEST_ID:
            if has_id or not _ID.fullmatch(value):
                continue
            has_id = True
        elif name == NEVER_LEAVES or (not value.isascii() and name.replace(b"-", b"_") in READ_BY_SERVE):
            continue
        kept.append((name, value))
    return kept
