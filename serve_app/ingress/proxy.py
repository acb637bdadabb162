"""The Ingress' answer to a request: what an Engine streams, passed on as it comes.

When the Engine dies, another one is asked: before anything was sent, for the same again; in the middle of
a stream, for what follows, where the request's parameters allow that. A request that loses a second Engine
may be what they die of, and is not sent on.
"""

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Callable, MutableMapping
from contextlib import aclosing
from typing import Any

import grpc
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import RequestError, engine_failed, error_response, internal_error
from serve_app.api.headers import request_id
from serve_app.ingress.engine_call import EngineCall
from serve_app.ingress.poison import Losses, LostEngines, PoisonError
from serve_app.ingress.retry import LONG_S, TRIES, back_off, is_lost
from serve_app.ingress.splice import Sent, Splice, UnresumableError
from serve_app.relay.events import error_event
from serve_app.relay.frame import Head, Piece
from serve_app.relay.keepalive import KEEPALIVE_S
from serve_app.relay.request import RelayRequest
from serve_app.relay.usage import SCOPE_KEY, STATUS_KEY

logger = logging.getLogger("ray.serve")

UNAVAILABLE = 503
"""The status of an Engine that can't serve: it stops, or vLLM's engine has died."""


class BrokenOffError(Exception):
    """An Engine has ended an answer before it was complete."""


EXPECTED = (
    PoisonError,
    BrokenOffError,
    UnresumableError,
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
"""Errors that tell of an Engine or of a stream, beside those of an Engine that is lost, and of no fault."""


class ProxyResponse(Response):
    """An answer that an Engine streams. Its usage goes into the request's scope.

    Args:
        ask: Sends a request to an Engine.
        request: The request.
        lost: Counts the Engines that are lost with each request.
        keep_alive: Send a space every few seconds until the answer is there, which is JSON. The status is
            then 200; that of an error is in the answer's `error.code`.
        tries: Most engines to ask.
    """

    _failure: Exception | None = None
    """Why the call was given up here; None: it wasn't, or its client has left."""

    def __init__(
        self,
        ask: Callable[[RelayRequest], EngineCall],
        request: RelayRequest,
        lost: LostEngines,
        *,
        keep_alive: bool = False,
        tries: int = TRIES,
    ) -> None:
        self._ask = ask
        self._request = request
        self._lost = lost
        self._losses = Losses(lost.count(request))
        self._keep_alive = keep_alive
        self._tries = tries
        self._started = False
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
            head, piece = await (self._begin_alive(send) if self._keep_alive else self._begin())
        except Exception as error:
            # `_log` logs the stack of a fault.
            if self._failure is None:
                self._log("an engine failed before it answered", error)
            response = error_response(unavailable(self._failure or error), self._request.path)
            if self._started:
                scope[STATUS_KEY] = response.status_code
                await send({"type": "http.response.body", "body": response.body, "more_body": False})
            else:
                await response(scope, receive, send)
            return
        headers = head.headers
        if piece.usage is not None and not any(name.lower() == b"content-length" for name, _ in headers):
            # Clients of HTTP/1.0 can't read chunks.
            headers = [*headers, (b"content-length", str(len(piece.body)).encode())]
        if self._started:
            scope[STATUS_KEY] = head.status
        else:
            await send({"type": "http.response.start", "status": head.status, "headers": headers})
        if piece.usage is not None:
            _keep_usage(scope, piece)
            self._answered(head)
            await send({"type": "http.response.body", "body": piece.body, "more_body": False})
            return
        async with aclosing(self._bodies(head, piece, scope)) as bodies:
            async for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin_alive(self, send: Send) -> tuple[Head, Piece]:
        """Do as `_begin`, and send a space every few seconds meanwhile: JSON may begin with spaces."""
        beginning = asyncio.ensure_future(self._begin())
        try:
            while not (await asyncio.wait([beginning], timeout=KEEPALIVE_S))[0]:
                if not self._started:
                    self._started = True
                    headers = [(b"content-type", b"application/json")]
                    await send({"type": "http.response.start", "status": 200, "headers": headers})
                await send({"type": "http.response.body", "body": b" ", "more_body": True})
            return beginning.result()
        finally:
            beginning.cancel()

    def _log(self, event: str, error: Exception) -> None:
        """Log a failure: one of an engine or a limit in a line, any other one with its stack."""
        if is_expected(error):
            logger.warning("%s: %r", event, error)
        else:
            id = request_id(self._request.headers)
            logger.error("request %s to %s: %s", id, self._request.path, event, exc_info=error)

    def _answered(self, head: Head) -> None:
        # A refusal, such as that of a full queue, says nothing of what the request would do.
        if head.status < 400:
            self._lost.forget(self._request)

    def _note_loss(self, error: Exception) -> None:
        """Count an Engine that was lost while it had the request.

        Raises:
            PoisonError: It may be what they die of.
        """
        if not self._losses.add(error, self._call.engine):
            return
        self._lost.note(self._request, self._losses.count)
        try:
            self._losses.check()
        except PoisonError:
            logger.error(
                "%d engines were lost with the same request; it is not sent on: %r", self._losses.count, error
            )
            raise

    async def _begin(self) -> tuple[Head, Piece]:
        """Return the head and the first piece, from the first Engine that answers."""
        while True:
            try:
                head, piece = await self._first_piece()
                if piece.usage is not None:
                    await self._finish()
                if head.status != UNAVAILABLE or self._tried == self._tries:
                    return head, piece
                logger.info("an engine can't serve; trying another")
            except Exception as error:
                # Another engine is tried only for one that is lost, and what is raised is logged above.
                self._note_loss(error)
                if not is_lost(error) or self._tried == self._tries:
                    raise
                logger.warning("an engine failed before it answered; trying another: %r", error)
            await self._ask_again(self._request)

    async def _first_piece(self) -> tuple[Head, Piece]:
        piece = await self._next_piece()
        if piece.head is None:
            raise BrokenOffError("the first message of the engine's answer has no head")
        return piece.head, piece

    async def _next_piece(self) -> Piece:
        async for piece in self._call:
            return piece
        raise BrokenOffError("the engine ended its answer early")

    async def _finish(self) -> None:
        """Read a call whose answer is complete to its end.

        Ray Serve takes a request whose answer is complete for one whose client has left, and cancels the
        calls that still run.
        """
        try:
            async for _ in self._call:
                pass
        except Exception as error:
            # The client has its answer. What an engine raises, Ray Serve has logged there with its stack.
            logger.info("an engine failed behind its answer: %r", error)

    async def _bodies(self, head: Head, piece: Piece, scope: Scope) -> AsyncGenerator[bytes, None]:
        """Yield a body of several pieces; have another Engine go on with a stream when its own is lost."""
        sent = Sent(head.resume)
        splice: Splice | None = None
        while True:
            began = time.monotonic()
            try:
                while True:
                    body = piece.body if splice is None else splice.rest(piece.body)
                    sent.add(piece.token_ids, body)
                    _keep_usage(scope, piece)
                    if body:
                        yield body
                    if piece.usage is not None:
                        self._answered(head)
                        await self._finish()
                        return
                    piece = await self._next_piece()
            except Exception as error:
                # The handler below logs it.
                failed = error
            try:
                if time.monotonic() - began < LONG_S:
                    self._note_loss(failed)
                piece, splice = await self._resume(sent, failed)
            except Exception as reason:
                # `_log` logs the stack of a fault.
                self._log("an engine failed in the middle of an answer", failed)
                if not isinstance(reason, UnresumableError):
                    self._log("the stream was to go on in another engine", reason)
                shown = unavailable(reason if isinstance(reason, PoisonError) else failed)
                break
        if not head.is_event_stream:
            # Without a last piece the connection breaks: the client can't take what it has for the whole.
            raise failed
        yield error_event(shown, self._request.path, piece.body)

    async def _resume(self, sent: Sent, error: Exception) -> tuple[Piece, Splice]:
        """Have another Engine go on with a stream; return its first piece, and what joins it to the others.

        Raises:
            UnresumableError: No other Engine can, or none is left to ask.
            PoisonError: Another Engine was lost with it.
        """
        if not is_lost(error):
            raise UnresumableError("the replica itself is not lost")
        request = sent.request(self._request)
        splice = sent.splice()
        while self._tried < self._tries:
            logger.warning("an engine failed in the middle of an answer; another goes on: %r", error)
            await self._ask_again(request)
            try:
                head, piece = await self._first_piece()
            except Exception as failure:
                # As in `_begin`.
                self._note_loss(failure)
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


def _keep_usage(scope: MutableMapping[str, Any], piece: Piece) -> None:
    if piece.usage is not None and piece.usage.prompt_tokens:
        scope[SCOPE_KEY] = piece.usage


def is_expected(error: Exception) -> bool:
    """Return whether an error tells of an Engine that is lost or full, or of a limit, and of no fault."""
    if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        return True
    return is_lost(error) or isinstance(error, EXPECTED)


def unavailable(error: Exception) -> RequestError:
    """Return the error for a client whose Engine failed, or whose request met a fault of the service."""
    if isinstance(error, PoisonError):
        return error
    if isinstance(error, grpc.RpcError) and error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
        message = "The request is larger than RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH. Send less at once."
        return RequestError(413, "request_too_large", message)
    if isinstance(error, BackPressureError):
        message = "Too many requests wait for this model. Try again."
        return RequestError(429, "rate_limit_error", message, retry_after_s=1.0)
    return engine_failed() if is_expected(error) else internal_error(error)
