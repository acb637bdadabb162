"""The watch over an engine, whose death is that of its process."""

import asyncio
import logging
import os
from collections.abc import Callable
from typing import TYPE_CHECKING

from serve_app.engine.watchdog import Watchdog

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.engine import VLLMEngine

logger = logging.getLogger("ray.serve")

WATCH_S = 0.25
"""Seconds between two checks of the engine's progress."""

LAST_ANSWERS_S = 0.25
"""Seconds in which the requests of a dead engine are answered, before its process ends."""


class EngineWatch:
    """Ends this process when its engine has died or hangs.

    Serve would replace the replica after three failed health checks only, and send requests here until then.
    It notices at once when the process is gone, and so does every caller. The processes that the engine
    started end with this one, even if they are stopped.

    Args:
        engine: The engine.
        timeout_s: Seconds that it may have work and make no step.
        excused: Tells whether it was ended on purpose; requests are told why.
        last: Called before the process ends.
    """

    def __init__(
        self,
        engine: "VLLMEngine",
        timeout_s: float,
        *,
        excused: Callable[[], bool],
        last: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._excused = excused
        self._last = last
        self._task = asyncio.create_task(self._run())

    def check(self) -> None:
        """Raise the error that has ended the watch, if one has."""
        if self._task.done():
            self._task.result()

    def stop(self) -> None:
        """End the watch."""
        self._task.cancel()

    async def _run(self) -> None:
        watchdog = Watchdog(self._timeout_s, WATCH_S)
        engine = self._engine
        while True:
            await asyncio.sleep(WATCH_S)
            if self._excused():
                continue
            if engine.died:
                logger.error("vLLM's engine has died; this replica ends, and Serve starts another")
                await asyncio.sleep(LAST_ANSWERS_S)
            elif watchdog.look(busy=engine.busy, steps=engine.steps):
                logger.error(
                    "vLLM's engine has work and made no step for %.0f s (engine_hang_timeout_s); this "
                    "replica ends, and Serve starts another",
                    self._timeout_s,
                )
            else:
                continue
            self._last()
            os._exit(1)
