"""Whole answers for clients of HTTP/1.0, which can't read an answer in chunks."""

import sys

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from serve_app.api.errors import RequestError, error_response, path_of
from serve_app.ingress.body import BodyBudget, HeldBody

MAX_BYTES = 32 << 20
"""Most bytes of an answer that are kept until it is whole."""


class _RefusedError(Exception):
    """The answer can't be kept.

    Args:
        error: The reason, as the client gets it.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class HTTP10Middleware:
    """Sends an answer without a length to a client of HTTP/1.0 once it is whole, with its length.

    The server would send it in chunks, whatever the client's version: such a client takes their sizes for
    content, and waits for the end of the connection.

    Args:
        app: The application.
        budget: Counts the bytes of the answers, with those of the bodies of requests; None: nothing does.
    """

    def __init__(self, app: ASGIApp, budget: BodyBudget | None = None) -> None:
        self._app = app
        self._budget = budget or BodyBudget(sys.maxsize)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the application."""
        if scope["type"] != "http" or scope["http_version"] != "1.0":
            await self._app(scope, receive, send)
            return
        held = HeldBody(self._budget)
        whole = _WholeAnswer(send, held)
        try:
            await self._app(scope, receive, whole.send)
        except _RefusedError as refused:
            await error_response(refused.error, path_of(scope))(scope, receive, send)
        finally:
            held.give_back()


class _WholeAnswer:
    """An answer that leaves at its end, unless its length is known at its start.

    Args:
        send: Takes its messages.
        held: Counts its bytes.
    """

    def __init__(self, send: Send, held: HeldBody) -> None:
        self._send = send
        self._held = held
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
                reason = (
                    f"HTTP/1.0: the answer is larger than {MAX_BYTES} bytes, which this version gets as a "
                    "whole; use HTTP/1.1"
                )
                raise _RefusedError(RequestError(400, "invalid_request_error", reason))
            try:
                self._held.add(len(body))
            except RequestError as error:
                raise _RefusedError(error) from None
            if message.get("more_body", False):
                return
            length = (b"content-length", str(self._size).encode())
            await self._send({**self._start, "headers": [*self._start["headers"], length]})
            self._start = None
            message = {"type": "http.response.body", "body": b"".join(self._pieces)}
        await self._send(message)
