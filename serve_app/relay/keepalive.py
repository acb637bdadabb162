"""Keep-alive messages on a relay stream.

A machine that loses its power or its network closes no connection: TCP gives up after minutes. So an Engine
with nothing to send yet sends a keep-alive message, and an Ingress that gets no message at all asks another
Engine.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

from serve_app.relay.frame import KEEP_ALIVE

KEEPALIVE_S = 5.0
"""Seconds without a message after which an Engine sends a keep-alive."""


class KeepAlive:
    """A timer that falls due when nothing was sent for a while.

    Args:
        wake: Called when it falls due.

    Attributes:
        due: Whether a keep-alive is to be sent.
    """

    __slots__ = ("_sent", "_timer", "_wake", "due")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._sent = True
        self.due = False
        self._tick()

    def sent(self) -> None:
        """Note that a message was sent."""
        self._sent = True
        self.due = False

    def stop(self) -> None:
        """Stop the timer."""
        self._timer.cancel()

    def _tick(self) -> None:
        # One timer per period, not per message: the silence lasts two periods at most.
        if not self._sent:
            self.due = True
            self._wake()
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._tick)


async def with_keepalive(answer: Awaitable[bytes | None]) -> AsyncGenerator[bytes, None]:
    """Yield keep-alive messages until an answer is there, and then the answer, if there is any."""
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([task], timeout=KEEPALIVE_S))[0]:
            yield KEEP_ALIVE
        if (message := task.result()) is not None:
            yield message
    finally:
        task.cancel()
