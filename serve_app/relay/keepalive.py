"""Signs of life: how a caller knows that an answer which takes its time is still on its way.

A machine that loses its power or its network says nothing: the connections to it stay open until TCP gives
up, after minutes. So an Engine that has nothing to send says that it is still at it, and an Ingress
that hears nothing at all asks another one.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable

KEEPALIVE_S = 5.0
"""Seconds without a message after which an Engine gives a sign of life."""

ALIVE = b""
"""The message that is a sign of life; all others hold something."""


class KeepAlive:
    """Falls due when nothing was sent for a while.

    Args:
        wake: Called when it falls due.

    Attributes:
        due: Whether a sign of life is to be sent.
    """

    __slots__ = ("_sent", "_timer", "_wake", "due")

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._sent = True
        self.due = False
        self._beat()

    def sent(self) -> None:
        """Take in that a message has left."""
        self._sent = True
        self.due = False

    def stop(self) -> None:
        """Nothing more is to be sent."""
        self._timer.cancel()

    def _beat(self) -> None:
        # One timer per period, not per message. So the silence lasts two periods at most.
        if not self._sent:
            self.due = True
            self._wake()
        self._sent = False
        self._timer = asyncio.get_running_loop().call_later(KEEPALIVE_S, self._beat)


async def with_keepalive(answer: Awaitable[bytes]) -> AsyncGenerator[bytes, None]:
    """Yield signs of life until an answer is there, and then the answer."""
    task = asyncio.ensure_future(answer)
    try:
        while not (await asyncio.wait([task], timeout=KEEPALIVE_S))[0]:
            yield ALIVE
        yield task.result()
    finally:
        task.cancel()
