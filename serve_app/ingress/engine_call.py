"""A call to an Engine, with a limit on how long the Engine may be silent."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

from ray.serve.handle import DeploymentHandle

from serve_app.api.errors import EngineLostError
from serve_app.relay.frame import KEEP_ALIVE, Piece, unpack
from serve_app.relay.keepalive import KEEPALIVE_S
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

SILENCE_S = 4 * KEEPALIVE_S
"""Seconds without a message after which an Engine counts as lost: twice the longest silence of one that
works, for one that is busy or far away."""


def relay_of(handle: DeploymentHandle[Any]) -> DeploymentHandle[Any]:
    """Return the handle of a deployment's method `relay`, which answers a `RelayRequest` with messages."""
    return handle.options(
        method_name="relay",
        stream=True,
        _by_reference=False,
        request_serialization="pickle",
        # Answers are bytes already; errors are part of them.
        response_serialization="noop",
    )


class Messages(Protocol):
    """The result of a handle for a method that streams."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def cancel(self) -> None: ...


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


class EngineCall:
    """The pieces of an answer, without the keep-alives between them.

    Iteration raises `EngineLostError`, or what the handle raises.

    Args:
        messages: What the handle returned.
        served: Tells whether any Engine could have the request by now; it may wait for one to start.
    """

    def __init__(self, messages: Messages, served: Callable[[], Awaitable[bool]]) -> None:
        self._call = messages
        self._messages = aiter(messages)
        self._served = served
        # While a client is slow to take a piece, no message is read, and silence says nothing.
        self._reading = False
        self._heard = False
        self._begun = False
        self._missed = 0
        self._silent = False
        self._asking: asyncio.Task[None] | None = None
        self._timer = self._arm()

    def __aiter__(self) -> "EngineCall":
        return self

    async def __anext__(self) -> Piece:
        self._reading = True
        try:
            while (message := await anext(self._messages)) == KEEP_ALIVE:
                self._heard = self._begun = True
        except (asyncio.CancelledError, Exception) as error:
            if cancellation.is_own():
                raise
            if self._silent:
                raise (EngineSilentError if self._taken else EngineUnreachedError) from None
            if isinstance(error, asyncio.CancelledError):
                raise EngineGoneError from None
            raise
        finally:
            self._reading = False
        self._heard = self._begun = True
        piece = unpack(message)
        if piece.lost:
            raise EngineLostError
        return piece

    @property
    def _taken(self) -> bool:
        """True if the Engine has the request. Ray Serve sets the result when a replica has accepted it."""
        return self._begun or getattr(self._call, "_replica_result", self) is not None

    def cancel(self) -> None:
        """End the Engine's work, if it isn't done."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._call.cancel()

    def _arm(self) -> asyncio.TimerHandle:
        # Half of the time, twice: a tick that comes late, since this process was busy, decides nothing.
        return asyncio.get_running_loop().call_later(SILENCE_S / 2, self._tick)

    def _tick(self) -> None:
        if self._heard or not self._reading:
            self._missed = 0
        else:
            self._missed += 1
        self._heard = False
        self._timer = self._arm()
        if self._missed >= 2:
            if self._begun:
                self._give_up()
            elif self._asking is None:
                self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """Give up if an Engine is there that could have answered; wait on while that is unknown."""
        try:
            served = await self._served()
        except Exception as error:
            logger.warning("Ray Serve doesn't tell whether an engine is there: %r", error)
            served = False
        self._asking = None
        if not served:
            self._missed = 0
        elif not self._begun:
            # An Engine that was heard meanwhile is watched by the ticks.
            self._give_up()

    def _give_up(self) -> None:
        self._silent = True
        self._timer.cancel()
        self._call.cancel()
