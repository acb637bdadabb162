"""A request that an Engine has, for as long as that gives signs of life."""

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Protocol

from serve_app.relay.keepalive import KEEPALIVE_S
from serve_app.relay.resume import EngineLostError
from serve_app.system import cancellation

logger = logging.getLogger("ray.serve")

SILENCE_S = 4 * KEEPALIVE_S
"""Seconds without a sign of life after which an Engine is taken for lost. Twice what one that is at work
takes, for one that is busy or far away."""


class Messages(Protocol):
    """What a handle returns for a method that streams."""

    def __aiter__(self) -> AsyncIterator[bytes]: ...

    def cancel(self) -> None: ...


class EngineSilentError(EngineLostError):
    """An Engine has given no sign of life."""

    def __str__(self) -> str:
        return f"its engine has given no sign of life for {SILENCE_S:g} s"


class EngineGoneError(EngineLostError):
    """Serve has ended a call."""

    def __str__(self) -> str:
        return "its engine was taken away"


class Call:
    """The messages of an answer, without the signs of life between them.

    Args:
        messages: What the handle returned.
        served: Whether any Engine could have the request by now. It may wait for one to start first.

    Raises, while it is read, `EngineLostError` and what the handle does.
    """

    def __init__(self, messages: Messages, served: Callable[[], Awaitable[bool]]) -> None:
        self._call = messages
        self._messages = aiter(messages)
        self._served = served
        # While a client is slow to take what was said, nobody listens.
        self._listening = False
        self._heard = False
        self._begun = False
        self._missed = 0
        self._silent = False
        self._asking: asyncio.Task[None] | None = None
        self._timer = self._arm()

    def __aiter__(self) -> "Call":
        return self

    async def __anext__(self) -> bytes:
        self._listening = True
        try:
            while not (message := await anext(self._messages)):
                self._heard = self._begun = True
        except (asyncio.CancelledError, Exception) as error:
            if cancellation.is_own():
                raise
            if self._silent:
                raise EngineSilentError from None
            if isinstance(error, asyncio.CancelledError):
                raise EngineGoneError from None
            raise
        finally:
            self._listening = False
        self._heard = self._begun = True
        return message

    def cancel(self) -> None:
        """End the Engine's work, if it isn't done."""
        self._timer.cancel()
        if self._asking is not None:
            self._asking.cancel()
        self._call.cancel()

    def _arm(self) -> asyncio.TimerHandle:
        # Half of it, twice: one that comes late, since this process was busy, says nothing yet.
        return asyncio.get_running_loop().call_later(SILENCE_S / 2, self._look)

    def _look(self) -> None:
        if self._heard or not self._listening:
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
        """Give up if an Engine is there that could have answered; where nobody knows, wait on."""
        try:
            served = await self._served()
        except Exception as error:
            logger.warning("whether an engine is there can't be told: %r", error)
            served = False
        self._asking = None
        if not served:
            self._missed = 0
        elif not self._heard:
            self._give_up()

    def _give_up(self) -> None:
        self._silent = True
        self._timer.cancel()
        self._call.cancel()
