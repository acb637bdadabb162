"""The Ingress' answer to a request that an Engine has: what the Engine streams, as it comes.

When the Engine dies, another one is asked. Before anything was sent, for the same again; in the middle of
a stream, for what follows, where its parameters allow that.
"""

import logging
from collections.abc import AsyncIterator, Callable

from ray.serve.exceptions import BackPressureError
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import RequestError, engine_failed, error_response
from serve_app.ingress.engine_call import Call
from serve_app.ingress.retry import TRIES, back_off, is_lost
from serve_app.ingress.splice import Sent, Splice, UnresumableError
from serve_app.relay.asgi import END, Head, RelayRequest, error_event, read_head
from serve_app.relay.resume import unframe
from serve_app.relay.usage import cut

logger = logging.getLogger("ray.serve")

UNAVAILABLE = 503
"""An Engine that can't serve says so with this status: it stops, or vLLM's engine has died."""


class ProxyResponse(Response):
    """An answer that an Engine streams.

    Args:
        ask: Sends a request to an Engine.
        request: The request.
    """

    def __init__(self, ask: Callable[[RelayRequest], Call], request: RelayRequest) -> None:
        self._ask = ask
        self._request = request
        self._tried = 1
        self._call = ask(request)
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Serve cancels this when the client leaves, and so ends the Engine's work."""
        try:
            await self._send(scope, receive, send)
        finally:
            self._cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head, piece, whole = await self._begin()
        except Exception as error:
            logger.warning("an engine failed before it answered: %r", error)
            await error_response(unavailable(error))(scope, receive, send)
            return
        await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        if whole:
            await send({"type": "http.response.body", "body": piece, "more_body": False})
            return
        if head.resume:
            await self._send_resumable(head, piece, send)
        else:
            await self._send_once(head, piece, send)
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin(self) -> tuple[Head, bytes, bool]:
        """Read the head and the first piece, from the first Engine that answers."""
        while True:
            try:
                head, piece, whole = await read_head(self._call)
                if whole:
                    await _finish(self._call)
                if head.status != UNAVAILABLE or self._tried == TRIES:
                    return head, piece, whole
                logger.info("an engine can't serve; trying another")
            except Exception as error:
                if not is_lost(error) or self._tried == TRIES:
                    raise
                logger.warning("an engine failed before it answered; trying another: %r", error)
            await self._ask_again(self._request)

    async def _send_once(self, head: Head, piece: bytes, send: Send) -> None:
        """Send what an Engine streams and no other could go on with."""
        await send({"type": "http.response.body", "body": piece, "more_body": True})
        try:
            async for piece in self._call:
                await send({"type": "http.response.body", "body": piece, "more_body": True})
        except Exception as error:
            if cut(piece)[0].endswith(END):
                logger.info("an engine failed behind its answer: %r", error)
                return
            logger.warning("an engine failed in the middle of an answer: %r", error)
            if not head.is_event_stream:
                # Ending without the last piece breaks the connection: the client can't take what it
                # has for the whole.
                raise
            body = error_event(unavailable(error))
            await send({"type": "http.response.body", "body": body, "more_body": True})

    async def _send_resumable(self, head: Head, piece: bytes, send: Send) -> None:
        """Send a stream, and have another Engine go on when one is lost."""
        sent = Sent(head.resume)
        splice: Splice | None = None
        while True:
            try:
                while True:
                    token_ids, body = unframe(piece)
                    body, usage = cut(body)
                    if splice is not None:
                        body = splice.rest(body)
                    sent.add(token_ids, body)
                    if body or usage:
                        await send({"type": "http.response.body", "body": body + usage, "more_body": True})
                    piece = await anext(self._call)
            except StopAsyncIteration:
                return
            except Exception as error:
                if sent.ended:
                    logger.info("an engine failed behind its answer: %r", error)
                    return
                try:
                    piece, splice = await self._resume(sent, error)
                except Exception as failure:
                    logger.warning("an engine failed in the middle of an answer: %r; %s", error, failure)
                    body = error_event(unavailable(error))
                    await send({"type": "http.response.body", "body": body, "more_body": True})
                    return

    async def _resume(self, sent: Sent, error: Exception) -> tuple[bytes, Splice]:
        """Have another Engine go on with a stream; return its first piece, and what fits it to the others.

        Raises:
            UnresumableError: None can, or none is left to ask.
        """
        if not is_lost(error):
            raise UnresumableError("that was no fault of its replica")
        request = sent.request(self._request)
        splice = sent.splice()
        while self._tried < TRIES:
            logger.warning("an engine failed in the middle of an answer; another goes on: %r", error)
            await self._ask_again(request)
            try:
                head, piece, _ = await read_head(self._call)
            except Exception as failure:
                if not is_lost(failure):
                    raise
                error = failure
                continue
            if head.resume:
                sent.start_over(head.resume)
                return piece, splice
            if head.status != UNAVAILABLE:
                raise UnresumableError(f"the other engine answered {head.status}")
        raise UnresumableError("no engine could go on")

    async def _ask_again(self, request: RelayRequest) -> None:
        self._cancel()
        await back_off(self._tried)
        self._tried += 1
        self._call = self._ask(request)

    def _cancel(self) -> None:
        self._call.cancel()


async def _finish(messages: AsyncIterator[bytes]) -> None:
    """Let a call whose answer is there come to its end.

    Serve takes a request whose answer is complete for one whose client has left, and cancels what still
    runs.
    """
    try:
        async for _ in messages:
            pass
    except Exception as error:
        logger.info("an engine failed behind its answer: %r", error)


def unavailable(error: Exception) -> RequestError:
    """Return what a client is told when its Engine failed."""
    if isinstance(error, BackPressureError):
        message = "Too many requests wait for this model. Try again."
        return RequestError(429, "rate_limit_error", message, retry_after_s=1.0)
    return engine_failed()
