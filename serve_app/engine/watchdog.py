"""Watches over a replica: its engine has to make progress, and its event loop has to turn."""

import asyncio
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    # vLLM takes seconds and a gigabyte.
    from serve_app.engine.vllm.engine import VLLMEngine

logger = logging.getLogger("ray.serve")

WATCH_S = 0.25
"""Seconds between two checks of the engine's progress."""

LAST_ANSWERS_S = 0.25
"""Seconds in which the requests of a dead engine are answered, before its process ends."""

MOST_INTERVALS = 2
"""Maximum intervals that a late check stands for: while this process didn't run either (it was busy, or the
machine slept), the engine's progress is unknown."""

BOUND_S = 1.0
"""Seconds for which the loop may be held."""

TICK_S = 0.25
"""Seconds between two ticks of the loop."""

FRAMES = 8
"""Innermost calls in a report."""


class EngineWatch:
    """Ends this process when its engine has died or hangs.

    Serve would replace the replica after three failed health checks only, and send requests here until then.
    It notices at once when the process is gone, and so does every caller. The processes that the engine
    started end with this one, even if they are stopped.

    An engine is judged by its progress: a process that hangs is alive too. An idle engine makes no progress
    and is fine.

    Args:
        engine: The engine.
        timeout_s: Seconds that it may have work and make no step; above the longest step, compilation
            included.
        excused: Returns whether it was ended on purpose; requests are told why.
        last: Called before the process ends.
        interval_s: Seconds between two checks.
        answers_s: Seconds in which the requests of a dead engine are answered.
        end: Ends the process, with its status.
        clock: Monotonic clock, in seconds.
    """

    def __init__(
        self,
        engine: "VLLMEngine",
        timeout_s: float,
        *,
        excused: Callable[[], bool],
        last: Callable[[], None],
        interval_s: float = WATCH_S,
        answers_s: float = LAST_ANSWERS_S,
        end: Callable[[int], None] = os._exit,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._engine = engine
        self._timeout_s = timeout_s
        self._excused = excused
        self._last = last
        self._interval_s = interval_s
        self._answers_s = answers_s
        self._end = end
        self._clock = clock
        self._looked_at = clock()
        self._steps = -1
        self._silent_s = 0.0

    def start(self) -> "EngineWatch":
        """Start, on the running loop."""
        self._task = asyncio.create_task(self._run())
        return self

    def check(self) -> None:
        """Raise the error that has ended the watch, if one has."""
        if self._task.done():
            self._task.result()

    def stop(self) -> None:
        """End the watch."""
        self._task.cancel()

    def hangs(self) -> bool:
        """Return whether the engine hangs; called once in an interval."""
        engine, now = self._engine, self._clock()
        passed_s = min(now - self._looked_at, MOST_INTERVALS * self._interval_s)
        silent = engine.busy and engine.steps == self._steps
        self._silent_s = self._silent_s + passed_s if silent else 0.0
        self._looked_at, self._steps = now, engine.steps
        return self._silent_s >= self._timeout_s

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._interval_s)
            if self._excused():
                continue
            if self._engine.died:
                logger.error("vLLM's engine has died; this replica ends, and Serve starts another")
                await asyncio.sleep(self._answers_s)
            elif self.hangs():
                logger.error(
                    "vLLM's engine has work and made no step for %.0f s (engine_hang_timeout_s); this "
                    "replica ends, and Serve starts another",
                    self._timeout_s,
                )
            else:
                continue
            self._last()
            self._end(1)


class LoopWatch:
    """Reports an event loop that is held: no request of the replica gets on meanwhile.

    A thread looks at the calls of the loop with the interpreter's lock. Python's `faulthandler` looks
    without the lock, which can end the process while other threads run.

    Args:
        bound_s: Seconds for which the loop may be held.
        tick_s: Seconds between two ticks of the loop, and between two looks of the thread.
    """

    def __init__(self, bound_s: float = BOUND_S, tick_s: float = TICK_S) -> None:
        self._bound_s = bound_s
        self._tick_s = tick_s
        self._longest_s = 0.0
        self._stopped = threading.Event()

    def start(self) -> "LoopWatch":
        """Start, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._ticked_at = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        threading.Thread(
            target=self._look, args=(threading.get_ident(),), name="loop-watch", daemon=True
        ).start()
        return self

    def stop(self) -> None:
        """Stop, on the loop."""
        self._stopped.set()
        self._timer.cancel()

    def take_longest(self) -> float:
        """Return the longest seconds for which the loop was held since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _held_s(self) -> float:
        return max(0.0, time.monotonic() - self._ticked_at - self._tick_s)

    def _tick(self) -> None:
        self._longest_s = max(self._longest_s, self._held_s())
        self._ticked_at = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _look(self, loop_thread: int) -> None:
        reported = 0.0
        while not self._stopped.wait(self._tick_s):
            held_s, tick = self._held_s(), self._ticked_at
            if held_s < self._bound_s or tick == reported:
                continue
            reported = tick
            calls = "".join(traceback.format_stack(sys._current_frames().get(loop_thread), FRAMES))
            logger.error("the event loop has been held for %.1f s; its innermost calls:\n%s", held_s, calls)
