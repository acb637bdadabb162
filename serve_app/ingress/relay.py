"""One call to an engine: the answer is passed on as it comes, and another engine is asked when one is lost.

Before anything was sent, the other engine gets the same request; in the middle of a stream, a request for
what follows (`resume.py`). A request that loses `MAX_LOST` engines may be the cause, and is not sent on.

A machine without power or network, and a process whose event loop is held, are silent alike. So before a
silent engine counts as lost, its process is asked for a connection, which the kernel accepts in its place.
"""

import asyncio
import logging
import random
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc
import ray
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
from serve_app.ingress.body import look
from serve_app.ingress.context import RequestContext, context_of
from serve_app.ingress.resume import ResumableStream, UnresumableError
from serve_app.system import cancellation
from serve_app.wire.frame import KEEP_ALIVE, KEEPALIVE_S, Head, Piece, error_event, unpack
from serve_app.wire.request import RelayRequest

logger = logging.getLogger("ray.serve")

LATE_S = 1.0
"""Seconds beyond its queue timeout in which an engine that is there may still take a request: it answers by
itself, and counts the request among those that came too late."""

TRIES = 4
"""Most engines that one request may meet after a loss, with engines that stop in good order or never take the
request."""

BACKOFF_S = 0.15
"""Mean seconds before the second try; they double with each. A replica that dies is gone by then."""

SILENCE_S = 4 * KEEPALIVE_S
"""Seconds without a message after which an engine counts as lost, unless its process lives: twice the longest
silence of an engine that works, for an engine that is busy or far away."""

TICKS = 4
"""Looks in that time. A look that comes late, since this process was busy, decides nothing by itself."""

HELD = 6
"""Times `SILENCE_S` after which an engine counts as lost although its process lives. Before that, Ray Serve
replaces a replica that answers no health check."""

CONNECT_S = 3.0
"""Seconds that the process of an engine has to be found and to accept a connection."""

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
    """Return the status of a gRPC error; None: the error is another one, or has no status."""
    return getattr(error, "code", lambda: None)() if isinstance(error, grpc.RpcError) else None


def is_lost(error: Exception) -> bool:
    """Return whether a call failed because its replica is gone, not because of what it asked."""
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


# One try


class EngineCall:
    """The pieces of an answer, without the keep-alives between them.

    Iteration raises `EngineLostError`, `LateError`, or what the handle raises. The silence of the engine
    counts from the first piece that is asked for.

    Args:
        messages: The result of a handle for a method that streams, such as Ray Serve's.
        served: Tells whether any engine could have the request by now; it may wait for one to start.
        lives: Tells whether the process of an engine lives, by the id of its actor.
        wait_s: Seconds within which an engine has to take the request, which then has its own deadline for
            it; None: no limit.
    """

    def __init__(
        self,
        messages: Any,
        served: Callable[[], Awaitable[bool]],
        lives: Callable[[str], Awaitable[bool]] | None = None,
        wait_s: float | None = None,
    ) -> None:
        self._call = messages
        self._messages = aiter(messages)
        self._served = served
        self._lives = lives or process_lives
        # While a client is slow to take a piece, no message is read, and silence says nothing.
        self._reading = False
        self._heard = False
        self._begun = False
        self._was_taken = False
        self._missed = 0
        self._silent = False
        self._late = False
        self._ended = False
        self._asking: asyncio.Task[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._expiry: asyncio.Task[None] | None = None
        if wait_s is not None:
            self._expiry = asyncio.ensure_future(self._expire(wait_s))

    def __aiter__(self) -> "EngineCall":
        return self

    async def __anext__(self) -> Piece:
        self._reading = True
        if self._timer is None and not self._ended:
            self._arm()
        try:
            while (piece := unpack(await anext(self._messages))) is KEEP_ALIVE:
                self._heard = self._begun = True
        except (asyncio.CancelledError, Exception) as error:
            if cancellation.is_own():
                raise
            if self._late:
                raise LateError from None
            if self._silent:
                raise (EngineSilentError if self._taken else EngineUnreachedError) from None
            if isinstance(error, asyncio.CancelledError):
                raise EngineGoneError from None
            raise
        finally:
            self._reading = False
        self._heard = self._begun = True
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
        self._ended = True
        if self._timer is not None:
            self._timer.cancel()
        if self._expiry is not None:
            self._expiry.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._call.cancel()

    async def _expire(self, wait_s: float) -> None:
        await asyncio.sleep(wait_s)
        if not self._taken and await self._is_served():
            await asyncio.sleep(LATE_S)
        if not self._taken:
            self._late = True
            self.cancel()

    def _arm(self) -> None:
        self._timer = asyncio.get_running_loop().call_later(SILENCE_S / TICKS, self._tick)

    def _tick(self) -> None:
        if self._heard or not self._reading or self._taken != self._was_taken:
            # The silence of an engine begins when it takes the request: it may just have started.
            self._missed = 0
        else:
            self._missed += 1
        self._heard = False
        self._was_taken = self._taken
        self._arm()
        if self._missed >= TICKS and self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """Give up if the engine is lost, or if one is there that could have taken the request."""
        taken = self._was_taken
        lost = await (self._is_gone() if taken else self._is_served())
        self._asking = None
        # Meanwhile it may have been heard, or have taken the request.
        if lost and self._missed >= TICKS and not self._heard and self._taken == taken:
            self._silent = True
            self.cancel()
        elif not taken:
            self._missed = 0

    async def _is_gone(self) -> bool:
        """Return whether the process of the engine is gone, or has been silent for too long."""
        return self._missed >= HELD * TICKS or self.engine is None or not await self._lives(self.engine)

    async def _is_served(self) -> bool:
        """Return whether an engine is there; False while that is unknown."""
        try:
            return await self._served()
        except Exception as error:
            # Its controller starts again, or is busy: it is asked again soon.
            logger.warning("Ray Serve doesn't tell whether an engine is there: %r", error)
            return False


class Relay:
    """The method `relay` of a deployment, which answers a `RelayRequest` with messages.

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

    def ask(self, request: RelayRequest) -> EngineCall:
        """Send a request to a replica."""
        messages = self._handle.remote(request)
        assert isinstance(messages, DeploymentResponseGenerator)
        return EngineCall(messages, self._served, wait_s=request.scheduling_now().queue_timeout_s)

    async def _served(self) -> bool:
        return await self._running() > 0


_looks: dict[str, asyncio.Task[bool]] = {}
"""The look at the process of each actor that is under way: many requests may ask at once."""


async def process_lives(actor: str, find: Callable[[str], Any] = ray._private.state.actors) -> bool:
    """Return whether the process of an actor accepts connections. It does while its event loop is held.

    Args:
        actor: Id of the actor.
        find: Returns the entry of an actor in Ray's table.
    """
    if (look := _looks.get(actor)) is None:
        look = _looks[actor] = asyncio.ensure_future(_accepts(actor, find))
        look.add_done_callback(lambda _: _looks.pop(actor, None))
    return await asyncio.shield(look)


async def _accepts(actor: str, find: Callable[[str], Any]) -> bool:
    try:
        async with asyncio.timeout(CONNECT_S):
            found = await asyncio.to_thread(find, actor)
            if found.get("State") != "ALIVE":
                return False
            address = found["Address"]
            _, writer = await asyncio.open_connection(address["IPAddress"], address["Port"])
    except Exception as error:
        # A process that is gone, or can't be asked, is what this looks for: its stack says no more.
        logger.warning("the process of a silent engine (actor %s) accepts no connection: %r", actor, error)
        return False
    writer.close()
    logger.warning("an engine (actor %s) is silent, but its process lives; it is waited for", actor)
    return True


# The bound on the tries of a request that may be the cause of its engines' loss


class Losses:
    """Engines that were lost in a row while one request ran on them.

    Attributes:
        count: The number of engines.
    """

    def __init__(self) -> None:
        self.count = 0
        self._engines: set[str] = set()
        self._refused = 0

    def add(self, error: Exception, engine: str | None = None) -> bool:
        """Return whether a call failed since its engine was lost while it had the request, and count it.

        An engine that is lost again and again is so `TRIES` times at most.

        Args:
            error: The error of the call.
            engine: Id of the engine, which is lost once: its process may take the request again while it
                ends. None: it isn't known.

        Raises:
            PoisonError: The request may not be tried on another engine.
        """
        if not ran_there(error):
            return False
        if engine in self._engines:
            return self.refused()
        if engine is not None:
            self._engines.add(engine)
        self.count += 1
        self._refused = 0
        if self.count >= MAX_LOST:
            logger.error(
                "%d engines were lost with the same request; it is not sent on: %r", self.count, error
            )
            raise PoisonError
        return True

    def refused(self) -> bool:
        """Return whether a 503 may come from the engine that was lost, whose process takes a second to end.

        The request is tried again then, since a caller that gets the 503 would count its losses from 0.
        """
        self._refused += 1
        return self.count > 0 and self._refused < TRIES

    async def back_off(self) -> None:
        """Wait before the next try, after a loss or a 503."""
        await back_off(1 + self._refused)


# The answer


class RelayResponse(Response):
    """An answer that an engine streams. Its usage goes into the request's context.

    Args:
        ask: Sends a request to an engine; called when the answer begins.
        request: The request.
        keep_alive: Send a space every few seconds until the answer is there, which is JSON. The status is
            then 200; that of an error is in the answer's `error.code`.
        died: Called with each request that was at an engine whose process is gone.
        tries: Most engines to ask.
    """

    _failure: Exception | None = None
    """Why the call was given up here; None: it wasn't, or its client has left."""

    def __init__(
        self,
        ask: Callable[[RelayRequest], EngineCall],
        request: RelayRequest,
        *,
        keep_alive: bool = False,
        died: Callable[[RelayRequest], None] = lambda request: None,
        tries: int = TRIES,
    ) -> None:
        self._start = ask
        self._died = died
        self._request = request
        self._losses = Losses()
        self._keep_alive = keep_alive
        self._tries = tries
        self._tried = 0
        self._call: EngineCall | None = None
        self._started = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Serve cancels this when the client leaves, and so ends the engine's work."""
        try:
            await self._send(scope, receive, send)
        finally:
            self._cancel()

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            head, piece = await (self._begin_alive(send) if self._keep_alive else self._begin(self._request))
        except Exception as error:
            # `_log` logs the stack of a fault.
            if self._failure is None and not isinstance(error, LateError):
                self._log("an engine failed before it answered", error)
            response = error_response(unavailable(self._failure or error), self._request.path)
            if self._started:
                context_of(scope).status = response.status_code
                await send({"type": "http.response.body", "body": response.body, "more_body": False})
            else:
                await response(scope, receive, send)
            return
        context = context_of(scope)
        if self._started:
            context.status = head.status
        else:
            await send({"type": "http.response.start", "status": head.status, "headers": head.headers})
        if piece.usage is not None:
            _keep_usage(context, piece)
            await send({"type": "http.response.body", "body": piece.body, "more_body": False})
            return
        async with aclosing(self._bodies(head, piece, context)) as bodies:
            async for body in bodies:
                await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _begin_alive(self, send: Send) -> tuple[Head, Piece]:
        """Do as `_begin`, and send a space every few seconds meanwhile: JSON may begin with spaces."""
        beginning = asyncio.ensure_future(self._begin(self._request))
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

    async def _begin(self, request: RelayRequest) -> tuple[Head, Piece]:
        """Return the head and the first piece of the first engine that can serve a request."""
        while True:
            await self._ask(request)
            try:
                head, piece = await self._first_piece()
                if piece.usage is not None:
                    await self._finish()
                if not head.elsewhere or self._tried == self._tries:
                    return head, piece
                logger.info("an engine can't serve; trying another")
            except Exception as error:
                # Another engine is tried only for one that is lost, and what is raised is logged above.
                if died_with_it(error):
                    self._died(request)
                self._note_loss(error)
                if not is_lost(error) or self._tried == self._tries:
                    raise
                logger.warning("an engine failed before it answered; trying another: %r", error)

    async def _bodies(self, head: Head, piece: Piece, context: RequestContext) -> AsyncGenerator[bytes, None]:
        """Yield a body of several pieces; have another engine go on with a stream when its own is lost."""
        stream = ResumableStream(head.resume, context.body)
        while True:
            began = asyncio.get_running_loop().time()
            try:
                while True:
                    body = stream.add(piece)
                    _keep_usage(context, piece)
                    if body:
                        yield body
                    if piece.usage is not None:
                        await self._finish()
                        return
                    piece = await self._next_piece()
            except Exception as error:
                # The handler below logs it.
                failed = error
                if died_with_it(error):
                    self._died(self._request)
            try:
                if asyncio.get_running_loop().time() - began < LONG_S:
                    self._note_loss(failed)
                piece = await self._resume(stream, failed)
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

    async def _resume(self, stream: ResumableStream, error: Exception) -> Piece:
        """Have another engine go on with a stream; return its first piece.

        Raises:
            UnresumableError: No other engine can, or none is left to ask.
            PoisonError: Another engine was lost with it.
        """
        if not is_lost(error):
            raise UnresumableError("the replica itself is not lost")
        request = await look(len(self._request.body), partial(stream.rest_of, self._request))
        if self._tried == self._tries:
            raise UnresumableError("no engine is left to ask")
        logger.warning("an engine failed in the middle of an answer; another goes on: %r", error)
        head, piece = await self._begin(request)
        if not head.resume:
            raise UnresumableError(f"the other engine answered {head.status}")
        stream.go_on(head.resume)
        return piece

    async def _first_piece(self) -> tuple[Head, Piece]:
        piece = await self._next_piece()
        if piece.head is None:
            raise BrokenOffError("the first message of the engine's answer has no head")
        return piece.head, piece

    async def _next_piece(self) -> Piece:
        assert self._call is not None
        async for piece in self._call:
            return piece
        raise BrokenOffError("the engine ended its answer early")

    async def _finish(self) -> None:
        """Read a call whose answer is complete to its end.

        Ray Serve takes a request whose answer is complete for one whose client has left, and cancels the
        calls that still run.
        """
        assert self._call is not None
        try:
            async for _ in self._call:
                pass
        except Exception as error:
            # The client has its answer. What an engine raises, Ray Serve has logged there with its stack.
            logger.info("an engine failed behind its answer: %r", error)

    def _note_loss(self, error: Exception) -> None:
        """Count an engine that was lost while it had the request. Tries are counted from each such engine.

        Raises:
            PoisonError: The request may be the cause.
        """
        assert self._call is not None
        before = self._losses.count
        self._losses.add(error, self._call.engine)
        if self._losses.count > before:
            self._tried = 1

    def _log(self, event: str, error: Exception) -> None:
        """Log a failure: one of an engine or a limit in a line, any other one with its stack."""
        if is_expected(error):
            logger.warning("%s: %r", event, error)
        else:
            id = request_id(self._request.headers)
            logger.error("request %s to %s: %s", id, self._request.path, event, exc_info=error)

    async def _ask(self, request: RelayRequest) -> None:
        """Send a request to an engine, after a pause if that is not the first one."""
        if self._call is not None:
            self._cancel()
            await back_off(self._tried)
        self._tried += 1
        self._call = self._start(request)

    def _cancel(self) -> None:
        if self._call is not None:
            self._call.cancel()


def _keep_usage(context: RequestContext, piece: Piece) -> None:
    if piece.usage is not None and piece.usage.engine_s:
        context.usage = piece.usage
