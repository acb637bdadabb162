"""Whole answers for clients of HTTP/1.0, which can't read an answer in chunks.

The server sends an answer without a length in chunks, whatever the client's version: such a client takes
their sizes for content, and waits for the end of the connection.
"""

from starlette.types import Message, Send

from serve_app.api.errors import RequestError
from serve_app.ingress.body import HeldBody

MAX_BYTES = 32 << 20
"""Most bytes of an answer that are kept until it is whole."""


class TooLargeError(Exception):
    """The answer can't be kept.

    Args:
        error: The reason, as the client gets it.
    """

    def __init__(self, error: RequestError) -> None:
        super().__init__(error.message)
        self.error = error


class WholeAnswer:
    """An answer that leaves at its end, with its length, unless the length is known at its start.

    Args:
        send: Takes its messages.
        held: Counts its bytes, with those of the request's body.
        most: Most bytes that are kept.
    """

    def __init__(self, send: Send, held: HeldBody, most: int = MAX_BYTES) -> None:
        self._send = send
        self._held = held
        self._most = most
        self._start: Message | None = None
        self._body = bytearray()

    async def send(self, message: Message) -> None:
        """Take a message of the answer.

        Raises:
            TooLargeError: The answer can't be kept; nothing of it was sent.
        """
        if message["type"] == "http.response.start":
            if not any(name.lower() == b"content-length" for name, _ in message["headers"]):
                self._start = message
                return
        elif self._start is not None:
            piece = message.get("body", b"")
            if len(self._body) + len(piece) > self._most:
                reason = (
                    f"HTTP/1.0: the answer is larger than {self._most} bytes, which this version gets as a "
                    "whole; use HTTP/1.1"
                )
                raise TooLargeError(RequestError(400, "invalid_request_error", reason))
            try:
                self._held.add(len(piece))
            except RequestError as error:
                raise TooLargeError(error) from None
            self._body += piece
            if message.get("more_body", False):
                return
            length = (b"content-length", str(len(self._body)).encode())
            await self._send({**self._start, "headers": [*self._start["headers"], length]})
            self._start = None
            message = {"type": "http.response.body", "body": bytes(self._body)}
        await self._send(message)
