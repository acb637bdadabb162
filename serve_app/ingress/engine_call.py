"""A call to an Engine, with a limit on how long the Engine may be silent.

A machine without power or network, and a process whose event loop is held, are silent alike. So before a
silent Engine is taken for lost, its process is asked for a connection, which the kernel accepts in its place.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, Protocol

import ray
from ray.serve.handle import DeploymentHandle

from serve_app.api.errors import EngineLostError
from serve_app.relay.frame import KEEP_ALIVE, Piece, unpack
from serve_app.relay.keepalive import KEEPALIVE_S
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

SILENCE_S = 4 * KEEPALIVE_S
"""Seconds without a message after which an Engine counts as lost, unless its process lives: twice the longest
silence of an Engine that works, for one that is busy or far away."""

TICKS = 4
"""Looks in that time. A look that comes late, since this process was busy, decides nothing by itself."""

HELD = 6
"""Times `SILENCE_S` after which an Engine counts as lost although its process lives. Before that, Ray Serve
replaces a replica that answers no health check."""

CONNECT_S = 3.0
"""Seconds that the process of an Engine has to be found and to accept a connection."""


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


_asked: dict[str, asyncio.Task[bool]] = {}
"""The look at the process of each actor that is under way: many requests may ask at once."""


async def process_lives(actor: str, find: Callable[[str], Any] = ray._private.state.actors) -> bool:
    """Return whether the process of an actor accepts connections. It does while its event loop is held.

    Args:
        actor: Id of the actor.
        find: Returns the entry of an actor in Ray's table.
    """
    if (look := _asked.get(actor)) is None:
        look = _asked[actor] = asyncio.ensure_future(_accepts(actor, find))
        look.add_done_callback(lambda _: _asked.pop(actor, None))
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
        lives: Tells whether the process of an Engine lives, by the id of its actor.
    """

    def __init__(
        self,
        messages: Messages,
        served: Callable[[], Awaitable[bool]],
        lives: Callable[[str], Awaitable[bool]] = process_lives,
    ) -> None:
        self._call = messages
        self._messages = aiter(messages)
        self._served = served
        self._lives = lives
        # While a client is slow to take a piece, no message is read, and silence says nothing.
        self._reading = False
        self._heard = False
        self._begun = False
        self._was_taken = False
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
    def engine(self) -> str | None:
        """The id of the actor that has the request; None: none has, or it isn't known."""
        actor = getattr(getattr(self._call, "_replica_result", None), "_actor_id", None)
        return None if actor is None else actor.hex()

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
        return asyncio.get_running_loop().call_later(SILENCE_S / TICKS, self._tick)

    def _tick(self) -> None:
        if self._heard or not self._reading or self._taken != self._was_taken:
            # The silence of an Engine begins when it takes the request: it may just have started.
            self._missed = 0
        else:
            self._missed += 1
        self._heard = False
        self._was_taken = self._taken
        self._timer = self._arm()
        if self._missed >= TICKS and self._asking is None:
            self._asking = asyncio.ensure_future(self._ask())

    async def _ask(self) -> None:
        """Give up if the Engine is lost, or if one is there that could have taken the request."""
        taken = self._was_taken
        lost = await (self._is_gone() if taken else self._is_served())
        self._asking = None
        # Meanwhile it may have been heard, or have taken the request.
        if lost and self._missed >= TICKS and not self._heard and self._taken == taken:
            self._give_up()
        elif not taken:
            self._missed = 0

    async def _is_gone(self) -> bool:
        """Return whether the process of the Engine is gone, or has been silent for too long."""
        return self._missed >= HELD * TICKS or self.engine is None or not await self._lives(self.engine)

    async def _is_served(self) -> bool:
        """Return whether an Engine is there; False while that is unknown."""
        try:
            return await self._served()
        except Exception as error:
            # Its controller starts again, or is busy: it is asked again soon.
            logger.warning("Ray Serve doesn't tell whether an engine is there: %r", error)
            return False

    def _give_up(self) -> None:
        self._silent = True
        self._timer.cancel()
        self._call.cancel()
