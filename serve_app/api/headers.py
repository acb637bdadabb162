"""HTTP headers in ASGI's form."""

Headers = list[tuple[bytes, bytes]]
"""Names, in lower case, and values."""

KEEP_ALIVE = "x-keep-alive"
"""Header of a call whose answer may begin with spaces, sent while the call waits or runs."""

TRACE_CONTEXT = (b"traceparent", b"tracestate")
"""The headers of W3C's trace context."""

MAX_ID = 128
"""Longest request id, in bytes; longer ids are cut off."""


def bearer_token(headers: Headers) -> bytes:
    """Return the token of the `Authorization: Bearer` header; empty if there is none."""
    for name, value in headers:
        if name == b"authorization":
            scheme, _, token = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return token.strip()
    return b""


def request_id(headers: Headers) -> str:
    """Return the id of a request, cut to `MAX_ID` bytes; empty without the header."""
    for name, value in headers:
        if name == b"x-request-id":
            return value[:MAX_ID].decode("latin-1")
    return ""


def trace_context(headers: Headers) -> dict[str, str]:
    """Return the trace context of a request, by the names of its headers."""
    return {name.decode(): value.decode("latin-1") for name, value in headers if name in TRACE_CONTEXT}
