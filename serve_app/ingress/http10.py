"""Whole answers for clients of HTTP/1.0, which can't read an answer in chunks."""

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response

MAX_BYTES = 32 << 20
"""Most bytes of an answer that are kept until it is whole."""


class _TooLargeError(Exception):
    """The answer is larger than `MAX_BYTES`."""


class HTTP10Middleware:
    """Sends an answer without a length to a client of HTTP/1.0 once it is whole, with its length.

    The server would send it in chunks, whatever the client's version: such a client takes their sizes for
    content, and waits for the end of the connection.

    Args:
        app: The application.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["http_version"] != "1.0":
            await self._app(scope, receive, send)
            return
        whole = _WholeAnswer(send)
        try:
            await self._app(scope, receive, whole.send)
        except _TooLargeError:
            message = (
                f"HTTP/1.0: the answer is larger than {MAX_BYTES} bytes, which this version gets as a "
                "whole; use HTTP/1.1"
            )
            error = RequestError(400, "invalid_request_error", message)
            await error_response(error, scope["path"])(scope, receive, send)


class _WholeAnswer:
    """An answer that leaves at its end, unless its length is known at its start."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._start: Message | None = None
        self._pieces: list[bytes] = []
        self._size = 0

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                self._start = message
                return
        elif self._start is not None:
            body = message.get("body", b"")
            self._pieces.append(body)
            self._size += len(body)
            if self._size > MAX_BYTES:
                raise _TooLargeError
            if message.get("more_body", False):
                return
            length = (b"content-length", str(self._size).encode())
            await self._send({**self._start, "headers": [*self._start["headers"], length]})
            self._start = None
            message = {"type": "http.response.body", "body": b"".join(self._pieces)}
        await self._send(message)
