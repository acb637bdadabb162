"""Reports what holds the event loop: while it is held, no request of the replica gets on."""

import asyncio
import logging
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import PurePath
from types import FrameType

from serve_app.api.headers import Headers, request_id
from serve_app.relay.request import RelayRequest
from serve_app.system.rounds import Rounds

logger = logging.getLogger("ray.serve")

BOUND_S = 1.0
"""Seconds for which the loop may be held."""

TICK_S = 0.25
"""Seconds between two ticks of the loop, and between two looks of the thread at them."""

FRAMES = 8
"""Innermost calls in a report."""


class LoopWatch:
    """A thread that looks whether the event loop turns, and logs what it does if it doesn't.

    Nothing is done per request: the request is found in the stack of the loop's thread.

    Args:
        bound_s: Seconds for which the loop may be held.
        tick_s: Seconds between two looks.
    """

    def __init__(self, bound_s: float = BOUND_S, tick_s: float = TICK_S) -> None:
        self._bound_s = bound_s
        self._tick_s = tick_s
        self._longest_s = 0.0
        self._reported_tick = 0.0
        self._stopped = threading.Event()

    def start(self) -> "LoopWatch":
        """Start, on the running loop."""
        self._loop = asyncio.get_running_loop()
        self._loop_thread = threading.get_ident()
        self._ticked_at = time.monotonic()
        self._timer = self._loop.call_later(self._tick_s, self._tick)
        threading.Thread(target=self._watch, name="loop-watch", daemon=True).start()
        return self

    def stop(self) -> None:
        """Stop, on the loop."""
        self._stopped.set()
        self._timer.cancel()

    def take_longest(self) -> float:
        """Return the longest seconds for which the loop was held since the last call."""
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s

    def _tick(self) -> None:
        held_s, last = self._held_s(), self._ticked_at
        self._longest_s = max(self._longest_s, held_s)
        self._ticked_at = time.monotonic()
        if self._reported_tick == last:
            logger.error("the event loop turns again; it was held for %.1f s", held_s)
        self._timer = self._loop.call_later(self._tick_s, self._tick)

    def _held_s(self) -> float:
        return max(0.0, time.monotonic() - self._ticked_at - self._tick_s)

    def _watch(self) -> None:
        rounds = Rounds("the watch over the event loop")
        while not self._stopped.wait(self._tick_s):
            # The loop goes on while its stack is read.
            with rounds.round():
                self._look()

    def _look(self) -> None:
        held_s, last = self._held_s(), self._ticked_at
        if held_s < self._bound_s or self._reported_tick == last:
            return
        self._reported_tick = last
        stack = _stack(sys._current_frames().get(self._loop_thread))
        logger.error(
            "the event loop has been held for %.1f s by %s; its innermost calls: %s",
            held_s,
            _request(stack) or "no known request",
            ", ".join(map(_place, stack[:FRAMES])) or "none",
        )


def _stack(frame: FrameType | None) -> list[FrameType]:
    """Return a frame and its callers."""
    frames = []
    while frame is not None:
        frames.append(frame)
        frame = frame.f_back
    return frames


def _request(stack: Sequence[FrameType]) -> str | None:
    """Return the route and id of the request that a stack works on: an argument of one of its calls."""
    for frame in stack:
        for value in list(frame.f_locals.values()):
            if isinstance(value, RelayRequest):
                return _label(value.path, value.headers)
            if isinstance(value, dict) and value.get("type") == "http" and "headers" in value:
                return _label(value["path"], value["headers"])
    return None


def _label(path: str, headers: Headers) -> str:
    return f"a request to {path} (id {request_id(headers) or None!r})"


def _place(frame: FrameType) -> str:
    path = PurePath(frame.f_code.co_filename)
    return f"{'/'.join(path.parts[-2:])}:{frame.f_lineno} {frame.f_code.co_name}"
