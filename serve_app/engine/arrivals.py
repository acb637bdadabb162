"""The order in which requests are worked on before they ask for a slot of the batcher."""

import asyncio
from collections import deque

from serve_app.api.scheduling import TIER_PRIORITY

MOST_WAIT_S = 0.05
"""Seconds for which a flex request waits at most: so it goes on under any load."""


class Arrival:
    """A request between its arrival and its first slot.

    Args:
        arrivals: Those that are on their way.
        flex: Whether its tier is flex.
    """

    def __init__(self, arrivals: "Arrivals", flex: bool) -> None:
        self._arrivals: Arrivals | None = arrivals
        self._flex = flex

    def end(self) -> None:
        """Let the next one go on: it asks for a slot, or ends without. A second call does nothing."""
        if (arrivals := self._arrivals) is not None:
            self._arrivals = None
            arrivals.leave(self._flex)


class Arrivals:
    """Requests between their arrival and their first slot.

    They are parsed, rendered and tokenized there, which takes milliseconds of the event loop, and the order
    of the batcher doesn't hold yet. Flex requests come in bursts, whenever others of them end. So they go one
    at a time, and only while no other request is on its way.
    """

    def __init__(self) -> None:
        self._others = 0
        self._flex = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def enter(self, priority: int) -> Arrival:
        """Return the arrival of a request when its turn has come.

        Args:
            priority: Its tier.
        """
        flex = priority >= TIER_PRIORITY["flex"]
        if not flex:
            self._others += 1
        elif self._others or self._flex:
            await self._wait()
        else:
            self._flex += 1
        return Arrival(self, flex)

    def leave(self, flex: bool) -> None:
        """Take note of one that is no longer on its way."""
        if flex:
            self._flex -= 1
        else:
            self._others -= 1
        while self._waiting and (self._waiting[0].done() or not (self._others or self._flex)):
            self._give(self._waiting.popleft())

    async def _wait(self) -> None:
        loop = asyncio.get_running_loop()
        turn = loop.create_future()
        self._waiting.append(turn)
        timer = loop.call_later(MOST_WAIT_S, self._give, turn)
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():
                # It had its turn already.
                self.leave(True)
            raise
        finally:
            timer.cancel()

    def _give(self, turn: "asyncio.Future[None]") -> None:
        """Give a request its turn, unless it has it or was cancelled."""
        if not turn.done():
            self._flex += 1
            turn.set_result(None)
