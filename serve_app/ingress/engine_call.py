"""One call of an engine, with its further tries, the resumption of its stream, and its end.

Before anything was sent, another engine gets the same request; in the middle of a stream, a request for what
follows (`resume.py`). A request that loses `MAX_LOST` engines may be the cause, and is not sent on.

The Ingress, the rows of batches and jobs with a handle all call engines by `EngineCall`.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, aclosing, nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import grpc
from ray.exceptions import RayActorError
from ray.serve.exceptions import (
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from serve_app.api.errors import (
    EngineLostError,
    RequestError,
    engine_failed,
    error_response,
    internal_error,
)
from serve_app.api.headers import request_id
from serve_app.ingress.body import HeldBody, look
from serve_app.ingress.context import context_of
from serve_app.ingress.replica_choice import ReplicaCharge
from serve_app.ingress.resume import ResumableStream, UnresumableError
from serve_app.system import cancellation
from serve_app.wire.frame import KEEP_ALIVE, KEEPALIVE_S, Head, Piece, error_event, unpack
from serve_app.wire.request import RelayRequest
from serve_app.wire.usage import RequestUsage

logger = logging.getLogger("ray.serve")

TRIES = 5
"""Most engines that a request is sent to before it is lost with one, and again after each such loss. Some
engines stop in good order, or never take the request. A dying engine refuses requests until its end."""

BACKOFF_S = 0.15
"""Mean seconds before the second try; they double with each. A replica that dies is gone by then."""

SILENCE_S = 60.0
"""Seconds without a message after which an engine counts as lost: its machine has no power or no network, or
its event loop is held. An engine that works sends a keep-alive within twice `KEEPALIVE_S`."""

TICKS = round(SILENCE_S / KEEPALIVE_S)
"""Looks in that time. A look that comes late, since this process was busy, decides nothing by itself."""

LATE_S = 5.0
"""Seconds beyond its queue timeout in which an engine that is there may still take a request: it answers by
itself, with the record's name and with the records that were in time, and counts the request as late. The
event loop of an engine on a full machine can be late by seconds."""

MAX_LOST = 3
"""The loss with this number is a request's result. Two engines may die one after the other of anything, and
all requests that they had are answered by the third."""

LONG_S = 300.0
"""Seconds of a stream after which the stream can't be the cause of its engine's loss."""

_BROKEN = {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED, grpc.StatusCode.INTERNAL}


class BrokenOffError(Exception):
    """An engine has ended an answer before it was complete."""


class EngineSilentError(EngineLostError):
    """The engine has sent no message for too long."""

    def __str__(self) -> str:
        return f"its engine has sent nothing for {SILENCE_S:g} s"


class EngineUnreachedError(EngineLostError):
    """The engine has not taken the request for too long."""

    def __str__(self) -> str:
        return f"its engine has not taken it for {SILENCE_S:g} s"


class EngineGoneError(EngineLostError):
    """Ray Serve has cancelled the call, since it takes the replica away."""

    def __str__(self) -> str:
        return "its engine was taken away"


class PoisonError(RequestError):
    """Too many engines were lost with a request."""

    def __init__(self) -> None:
        message = (
            f"{MAX_LOST} engines failed one after the other while this request ran; it is not tried again."
        )
        super().__init__(500, "internal_error", message, final=True)


class LateError(RequestError):
    """No engine has taken a request in the time that the request may wait."""

    def __init__(self) -> None:
        super().__init__(408, "timeout_error", "The request could not start in the time it allows.")


_EXPECTED = (
    PoisonError,
    LateError,
    BrokenOffError,
    UnresumableError,
    BackPressureError,
    DeploymentUnavailableError,
    ReplicaUnavailableError,
    RequestCancelledError,
)
"""Errors beside a lost engine that tell of an engine or of a stream, and of no fault."""


def _status(error: Exception) -> grpc.StatusCode | None:
    """Return the status of a gRPC error; None: the error is not from gRPC, or has no status."""
    return getattr(error, "code", lambda: None)() if isinstance(error, grpc.RpcError) else None


def is_lost(error: Exception) -> bool:
    """Return whether a call failed because its replica is gone, not because of the request."""
    return isinstance(error, RayActorError | EngineLostError) or _status(error) in _BROKEN


def ran_there(error: Exception) -> bool:
    """Return whether a replica was lost while it had the request, by the error of the call.

    Ray Serve itself sends a request on that no replica has accepted. So every error tells of a replica that
    had the request, except the errors of a replica that stops in good order or that never answered.
    """
    before = isinstance(error, EngineUnreachedError | EngineGoneError)
    return is_lost(error) and not before and _status(error) is not grpc.StatusCode.CANCELLED


def is_expected(error: Exception) -> bool:
    """Return whether an error tells of an engine that is lost or full, or of a limit, and of no fault."""
    full = _status(error) is grpc.StatusCode.RESOURCE_EXHAUSTED
    return full or is_lost(error) or isinstance(error, _EXPECTED)


def unavailable(error: Exception) -> RequestError:
    """Return the error for a client whose engine failed, or whose request met a fault of the service."""
    if isinstance(error, PoisonError | LateError):
        return error
    if _status(error) is grpc.StatusCode.RESOURCE_EXHAUSTED:
        message = "The request is larger than RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH. Send less at once."
        return RequestError(413, "request_too_large", message)
    if isinstance(error, BackPressureError):
        message = "Too many requests wait for this model. Try again."
        return RequestError(429, "rate_limit_error", message, retry_after_s=1.0)
    return engine_failed() if is_expected(error) else internal_error(error)


def died_with_it(error: Exception) -> bool:
    """Return whether the process of a replica is gone that had the request, so that it wrote no row of it."""
    return ran_there(error) and type(error) is not EngineLostError


async def back_off(tried: int) -> None:
    """Wait before the next try, with jitter: many requests may have lost the same replica.

    Args:
        tried: Tries so far.
    """
    await asyncio.sleep(BACKOFF_S * 2 ** (tried - 1) * random.uniform(0.5, 1.5))


# One engine


class Attempt:
    """The pieces of one engine's answer, without the keep-alives between them.

    Iteration raises `EngineLostError`, `LateError`, or the errors of the handle. The silence of the engine
    counts from the first piece that is asked for.

    Args:
        messages: The result of a handle for a method that streams, such as Ray Serve's.
        served: Tells whether any engine could have the request by now; it may wait for one to start.
        wait_s: Seconds within which an engine has to take the request, which then has its own deadline for
            it; None: no limit.
    """

    def __init__(
        self, messages: Any, served: Callable[[], Awaitable[bool]], wait_s: float | None = None
    ) -> None:
        self._call = messages
        self._messages = aiter(messages)
        self._served = served
        # While a client is slow to take a piece, no message is read, and silence says nothing.
        self._reading = self._begun = self._was_taken = False
        self._missed = 0
        self._given_up: Exception | None = None
        self._asking: asyncio.Task[None] | None = None
        self._loop = asyncio.get_running_loop()
        self._timer = self._loop.call_later(KEEPALIVE_S, self._tick)
        self._expiry = None if wait_s is None else asyncio.ensure_future(self._expire(wait_s))

    def __aiter__(self) -> "Attempt":
        return self

    async def __anext__(self) -> Piece:
        self._reading, self._missed = True, 0
        try:
            while (piece := unpack(await anext(self._messages))) is KEEP_ALIVE:
                self._begun, self._missed = True, 0
        except (asyncio.CancelledError, Exception) as error:
            if cancellation.is_own():
                raise
            if self._given_up is not None:
                raise self._given_up from None
            if isinstance(error, asyncio.CancelledError):
                raise EngineGoneError from None
            raise
        finally:
            self._reading = False
        self._begun = True
        if piece.lost:
            raise EngineLostError
        return piece

    @property
    def engine(self) -> str | None:
        """The id of the actor that has the request; None: none has, or it isn't known."""
        actor = getattr(getattr(self._call, "_replica_result", None), "_actor_id", None)
        return None if actor is None else actor.hex()

    @property
    def _taken(self) -> bool:
        """True if the engine has the request. Ray Serve sets the result when a replica has accepted it."""
        return self._begun or getattr(self._call, "_replica_result", self) is not None

    def cancel(self) -> None:
        """End the engine's work, if it isn't done."""
        self._timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._call.cancel()

    def _give_up(self, error: Exception) -> None:
        self._given_up = error
        self.cancel()

    async def _expire(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if not self._taken and await self._is_served():
            await asyncio.sleep(LATE_S)
        if not self._taken:
            self._give_up(LateError())

    def _tick(self) -> None:
        self._timer = self._loop.call_later(KEEPALIVE_S, self._tick)
        if self._taken != self._was_taken or not self._reading:
            # The silence of an engine begins when it takes the request: it may just have started.
            self._was_taken, self._missed = self._taken, 0
            return
        self._missed += 1
        if self._missed < TICKS:
            return
        if self._taken:
            self._give_up(EngineSilentError())
        elif self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """Give up if an engine is there that could have taken the request."""
        served = await self._is_served()
        self._asking, self._missed = None, 0
        # An engine may have taken it meanwhile.
        if served and not self._taken:
            self._give_up(EngineUnreachedError())

    async def _is_served(self) -> bool:
        try:
            return await self._served()
        except Exception as error:
            # Its controller starts again, or is busy: it is asked again soon.
            logger.warning("Ray Serve doesn't tell whether an engine is there: %r", error)
            return False


class Engines:
    """The replicas of a deployment whose method `relay` answers a `RelayRequest` with messages.

    Args:
        handle: The deployment.
        running: Returns the number of its replicas.
    """

    def __init__(self, handle: DeploymentHandle[Any], running: Callable[[], Awaitable[int]]) -> None:
        self._handle = handle.options(
            method_name="relay",
            stream=True,
            _by_reference=False,
            request_serialization="pickle",
            # Answers are bytes already; errors are part of them.
            response_serialization="noop",
        )
        self._running = running

    def ask(self, request: RelayRequest) -> Attempt:
        """Send a request to a replica."""
        messages = self._handle.remote(request)
        assert isinstance(messages, DeploymentResponseGenerator)
        return Attempt(messages, self._served, request.scheduling_now().queue_timeout_s)

    async def _served(self) -> bool:
        return await self._running() > 0


# One request


class EngineCall:
    """A request at engines: at one after the other, until one has answered.

    Args:
        ask: Sends the request to an engine.
        request: The request.
        died: Called for each engine that had the request and whose process is gone.
        tries: Most engines to ask between two losses; see `TRIES`.
        alone: Entered for the tries at the last engine that the request may lose.
        lost: The engines that were lost with the request in earlier calls, by the ids of their replicas; gets
            further ids. None of the list: the id isn't known.

    Attributes:
        request: The request.
        usage: Tokens and times of the answer; None: the answer isn't complete.
    """

    def __init__(
        self,
        ask: Callable[[RelayRequest], Attempt],
        request: RelayRequest,
        *,
        died: Callable[[], object] | None = None,
        tries: int = TRIES,
        alone: AbstractAsyncContextManager[Any] | None = None,
        lost: list[str | None] | None = None,
    ) -> None:
        self.request = request
        self.usage: RequestUsage | None = None
        self._ask = ask
        self._died = died
        self._tries = tries
        self._alone = alone or nullcontext()
        self._tried = 0
        self._lost = [] if lost is None else lost
        self._attempt: Attempt | None = None
        self._charge = ReplicaCharge()

    async def begin(self) -> tuple[Head, Piece]:
        """Return the head and the first piece of the first engine that can serve the request.

        Raises:
            PoisonError: Too many engines were lost with the request.
            Exception: No engine could serve it; `unavailable` makes the error for the client.
        """
        return await self._begin(self.request, self._first)

    async def whole(self) -> tuple[Head, bytes]:
        """Return the head and the body of the whole answer; raise as `begin` does."""
        head, piece = await self._begin(self.request, self._all)
        return head, piece.body

    async def rest(self, head: Head, piece: Piece, held: HeldBody) -> AsyncGenerator[bytes, None]:
        """Yield a body of several pieces; have another engine go on with a stream when its own is lost.

        Args:
            head: What `begin` returned.
            piece: What `begin` returned.
            held: Counts the bytes that are kept of a stream.
        """
        stream = ResumableStream(head.resume, held)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                while True:
                    body = stream.add(piece)
                    if body:
                        yield body
                    if piece.usage is not None:
                        await self._finish(piece)
                        return
                    piece = await self._next()
            except Exception as error:
                # The handler below logs it.
                failed = error
            try:
                self._note(failed, counts=asyncio.get_running_loop().time() - began < LONG_S)
                piece = await self._resume(stream, failed)
            except Exception as reason:
                # `log` logs the stack of a fault.
                self.log("an engine failed in the middle of an answer", failed)
                if not isinstance(reason, UnresumableError):
                    self.log("the stream was to go on in another engine", reason)
                shown = unavailable(reason if isinstance(reason, PoisonError) else failed)
                break
        if not head.is_event_stream:
            # Without a last piece the connection breaks: the client can't take what it has for the whole.
            raise failed
        yield error_event(shown, self.request.path, piece.body)

    def release(self) -> None:
        """End the work of the engine that has the request, if it isn't done."""
        if self._attempt is not None:
            self._attempt.cancel()
            self._charge.release()

    def log(self, event: str, error: Exception) -> None:
        """Log a failure: of an engine or a limit in a line, any other failure with its stack."""
        if is_expected(error):
            logger.warning("%s: %r", event, error)
        else:
            id = request_id(self.request.headers)
            logger.error("request %s to %s: %s", id, self.request.path, event, exc_info=error)

    async def _begin(
        self, request: RelayRequest, read: Callable[[], Awaitable[tuple[Head, Piece]]]
    ) -> tuple[Head, Piece]:
        while True:
            if self._attempt is not None:
                self.release()
                await back_off(self._tried)
            async with self._alone if len(self._lost) == MAX_LOST - 1 else nullcontext():
                self._tried += 1
                self._charge = ReplicaCharge(self._charge.met)
                self._attempt = self._ask(replace(request, charge=self._charge))
                try:
                    head, piece = await read()
                    if piece.usage is not None:
                        await self._finish(piece)
                    if not head.elsewhere or self._tried == self._tries:
                        return head, piece
                    logger.info("an engine can't serve; trying another")
                except Exception as error:
                    # Another engine is tried only for one that is lost, and what is raised is logged above.
                    self._note(error)
                    if not is_lost(error) or self._tried == self._tries:
                        raise
                    logger.warning("an engine failed before it answered; trying another: %r", error)

    def _note(self, error: Exception, counts: bool = True) -> None:
        """Note how the engine failed. Tries are counted from each engine that was lost with the request.

        An engine is lost once: its process may take the request again while it ends.

        Args:
            error: The error of the call.
            counts: Whether the request may be the cause.

        Raises:
            PoisonError: Too many engines were lost with the request.
        """
        assert self._attempt is not None
        if self._died is not None and died_with_it(error):
            self._died()
        engine = self._attempt.engine
        if not counts or not ran_there(error) or (engine is not None and engine in self._lost):
            return
        self._lost.append(engine)
        self._tried = 1
        if len(self._lost) >= MAX_LOST:
            logger.error("%d engines were lost with the same request; it is not sent on: %r", MAX_LOST, error)
            raise PoisonError

    async def _resume(self, stream: ResumableStream, error: Exception) -> Piece:
        """Have another engine go on with a stream; return its first piece.

        Raises:
            UnresumableError: No other engine can, or none is left to ask.
            PoisonError: Another engine was lost with it.
        """
        if not is_lost(error):
            raise UnresumableError("the replica itself is not lost")
        request = await look(len(self.request.body), partial(stream.rest_of, self.request))
        if self._tried == self._tries:
            raise UnresumableError("no engine is left to ask")
        logger.warning("an engine failed in the middle of an answer; another goes on: %r", error)
        head, piece = await self._begin(request, self._first)
        if not head.resume:
            raise UnresumableError(f"the other engine answered {head.status}")
        stream.go_on(head.resume)
        return piece

    async def _first(self) -> tuple[Head, Piece]:
        piece = await self._next()
        if piece.head is None:
            raise BrokenOffError("the first message of the engine's answer has no head")
        return piece.head, piece

    async def _all(self) -> tuple[Head, Piece]:
        head, piece = await self._first()
        bodies = [piece.body]
        while piece.usage is None:
            piece = await self._next()
            bodies.append(piece.body)
        return head, piece._replace(body=b"".join(bodies))

    async def _next(self) -> Piece:
        assert self._attempt is not None
        async for piece in self._attempt:
            return piece
        raise BrokenOffError("the engine ended its answer early")

    async def _finish(self, last: Piece) -> None:
        """Take the usage of an answer that is complete, and read the engine's call to its end.

        When an answer is complete, Ray Serve acts as if the client had left, and cancels the calls that still
        run.
        """
        assert self._attempt is not None
        assert last.usage is not None
        if last.usage.engine_s:
            self.usage = last.usage
        try:
            async for _ in self._attempt:
                pass
        except Exception as error:
            # The client has its answer. What an engine raises, Ray Serve has logged there with its stack.
            logger.info("an engine failed behind its answer: %r", error)


# The answer


class EngineResponse(Response):
    """An answer that an engine streams. Its usage goes into the request's context.

    Args:
        call: The call of the engine, which begins when the answer does.
        keep_alive: Send a space every few seconds until the answer is there, which is JSON. The status is
            then 200; the status of an error is in the answer's `error.code`.
    """

    _failure: Exception | None = None
    """Why the call was given up here; None: it wasn't, or its client has left."""

    def __init__(self, call: EngineCall, *, keep_alive: bool = False) -> None:
        self._call = call
        self._keep_alive = keep_alive
        self._started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Serve cancels this when the client leaves, and so ends the engine's work."""
        try:
            await self._send(scope, receive, send)
        finally:
            context_of(scope).usage = self._call.usage
            self._call.release()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        context = context_of(scope)
        try:
            head, piece = await (self._begin_alive(send) if self._keep_alive else self._call.begin())
        except Exception as error:
            # `log` logs the stack of a fault.
            if self._failure is None and not isinstance(error, LateError):
                self._call.log("an engine failed before it answered", error)
            response = error_response(unavailable(self._failure or error), self._call.request.path)
            if self._started:
                context.status = response.status_code
                await send({"type": "http.response.body", "body": response.body, "more_body": False})
            else:
                await response(scope, receive, send)
            return
        if self._started:
            context.status = head.status
        else:
            await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        if piece.usage is not None:
            await send({"type": "http.response.body", "body": piece.body, "more_body": False})
            return
        async with aclosing(self._call.rest(head, piece, context.body)) as bodies:
            async for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin_alive(self, send: Send) -> tuple[Head, Piece]:
        """Begin, and send a space every few seconds meanwhile: JSON may begin with spaces."""
        beginning = asyncio.ensure_future(self._call.begin())
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
