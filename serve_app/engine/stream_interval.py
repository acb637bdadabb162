"""The number of tokens of a stream that go into one piece."""

import math
import time
from collections.abc import Callable

WINDOW_S = 0.25
"""Seconds over which tokens are counted before they enter the rate."""

MEMORY_S = 1.0
"""Seconds after which a count weighs a third (1/e) of its first weight."""


class StreamInterval:
    """Bounds the pieces per second that a replica sends, over all of its streams together.

    A piece costs the same whether it holds one token or eight: its JSON, its message between two
    processes, its write to a socket. So the faster the engine makes tokens, the more of them go into one
    piece. The first token of a stream never waits, and those of a lone stream never do.

    Args:
        pieces_per_s: Pieces per second that a replica may send in total.
        most: Most tokens in one piece.
        clock: Returns the time in seconds.
    """

    __slots__ = ("_clock", "_most", "_pieces_per_s", "_since", "_tokens", "_tokens_per_s", "streams")

    def __init__(
        self,
        pieces_per_s: float = 1_000.0,
        most: int = 32,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pieces_per_s = pieces_per_s
        self._most = most
        self._clock = clock
        self._since = clock()
        self._tokens = 0
        self._tokens_per_s = 0.0
        self.streams = 0
        """Streams that are being sent now."""

    def count(self, tokens: int) -> None:
        """Count tokens that the engine made just now, of any stream."""
        self._tokens += tokens
        elapsed = self._clock() - self._since
        if elapsed >= WINDOW_S:
            kept = math.exp(-elapsed / MEMORY_S)
            self._tokens_per_s = kept * self._tokens_per_s + (1 - kept) * self._tokens / elapsed
            self._since += elapsed
            self._tokens = 0

    def tokens_per_piece(self) -> int:
        """Return how many tokens of a stream go into one piece now."""
        wanted = round(self._tokens_per_s / self._pieces_per_s)
        return max(1, min(wanted, self._most, self.streams))
