"""The interval between two pieces of a stream."""

import time
from collections.abc import Callable

LONGEST_S = 0.25
"""Most seconds that a token waits for the ones after it, however many streams there are."""

PIECES_PER_S = 1_000.0
"""Pieces per second that a replica sends of all its streams together, at most."""


def interval_s(streams: int, pieces_per_s: float = PIECES_PER_S) -> float:
    """Return the seconds between two pieces of each of so many streams."""
    return min(streams / pieces_per_s, LONGEST_S)


class PieceRate:
    """Bounds the pieces per second that a replica sends, over all of its streams together.

    A piece costs the same whether it holds one token or eight: its JSON, its message between two
    processes, its write to a socket. So each of n streams sends a piece every n / `pieces_per_s` seconds,
    with the tokens that it has by then.

    Args:
        pieces_per_s: Pieces per second that a replica may send in total.
        clock: Returns the time in seconds.
    """

    __slots__ = ("_clock", "_pieces_per_s", "streams")

    def __init__(
        self, pieces_per_s: float = PIECES_PER_S, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._pieces_per_s = pieces_per_s
        self._clock = clock
        self.streams = 0
        """Streams that are being sent now."""

    def next_piece(self) -> tuple[float, float]:
        """Return the time, and when a stream that sends a piece now may send its next one."""
        now = self._clock()
        return now, now + interval_s(self.streams, self._pieces_per_s)


class StreamInterval:
    """Tells vLLM when a stream sends its next piece: by the time, where vLLM's own interval counts tokens.

    vLLM 0.32 asks `interval > 1`, and then for each token of the stream but the first and the last
    `unsent tokens >= interval`.

    Args:
        rate: The rate of all streams. The stream has just sent a piece.
    """

    __slots__ = ("_due", "_rate")

    def __init__(self, rate: PieceRate) -> None:
        self._rate = rate
        self._due = rate.next_piece()[1]

    def __gt__(self, tokens: int) -> bool:
        # An interval of one, for which vLLM doesn't count what was sent, it never is.
        return True

    def __le__(self, unsent: int) -> bool:
        now, following = self._rate.next_piece()
        if now < self._due:
            return False
        self._due = following
        return True
