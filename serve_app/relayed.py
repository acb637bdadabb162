"""The Ingress' answer to a request that an Engine has: what the Engine streams, as it comes."""

import json
import logging
from collections.abc import AsyncIterator

from ray.serve.exceptions import BackPressureError
from ray.serve.handle import DeploymentResponseGenerator
from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from serve_app.errors import RequestError
from serve_app.relay import read_head

logger = logging.getLogger("ray.serve")


class Relayed(Response):
    """An answer that an Engine streams."""

    def __init__(self, messages: "DeploymentResponseGenerator[bytes]") -> None:
        self._messages = messages
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Serve cancels this when the client leaves, and so ends the Engine's work."""
        try:
            await self._send(scope, receive, send)
        finally:
            self._messages.cancel()  # type: ignore[no-untyped-call]

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        messages: AsyncIterator[bytes] = aiter(self._messages)
        try:
            head, piece, whole = await read_head(messages)
            if whole:
                # Serve takes a request whose answer is complete for one whose client has left, and
                # cancels what still runs: so the call comes to its end first.
                async for _ in messages:
                    pass
        except Exception as error:
            logger.warning("an engine failed before it answered: %r", error)
            await error_response(unavailable(error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        await send({"type": "http.response.body", "body": piece, "more_body": not whole})
        if whole:
            return
        try:
            async for piece in messages:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            logger.warning("an engine failed in the middle of an answer: %r", error)
            if not head.is_event_stream:
                # Ending without the last piece breaks the connection: the client can't take what it
                # has for the whole.
                raise
            event = json.dumps(unavailable(error).body())
            await send(
                {"type": "http.response.body", "body": f"data: {event}\n\n".encode(), "more_body": True}
            )
        await send({"type": "http.response.body", "body": b"", "more_body": False})


def unavailable(error: Exception) -> RequestError:
    """Return what a client is told when its Engine failed."""
    if isinstance(error, BackPressureError):
        message = "Too many requests wait for this model. Try again."
        return RequestError(429, "rate_limit_error", message, retry_after_s=1.0)
    return RequestError(
        503, "service_unavailable", "The engine that had this request failed. Try again.", retry_after_s=1.0
    )


def error_response(error: RequestError) -> JSONResponse:
    """Return an error as an HTTP response."""
    return JSONResponse(error.body(), error.status, error.headers())
