"""The interval between two pieces of a stream."""

LONGEST_S = 0.1
"""Most seconds that a token of a stream waits for the ones after it, however many streams there are."""

PIECES_PER_S = 1_000.0
"""Pieces per second that a replica sends of all its streams together, but for `LONGEST_S`."""

STREAMS = 16
"""Streams for which a piece has one token more, where it has a number of tokens."""

RECENT = 0.1
"""Part of a stream that has just ended in the seconds per token of all."""


def interval_s(streams: int, pieces_per_s: float = PIECES_PER_S) -> float:
    """Return the seconds between two pieces of each of so many streams."""
    return min(streams / pieces_per_s, LONGEST_S)


class StreamIntervals:
    """Decides the tokens in a piece of a stream when the stream begins.

    A piece costs the same whether it has one token or eight: its JSON, its message between two processes, its
    write to a socket. So the pieces of many streams have more tokens, as far as `LONGEST_S` allows.

    Attributes:
        streams: Streams that are being sent now.
    """

    def __init__(self) -> None:
        self.streams = 0
        self._token_s = 0.0

    def begin(self) -> int:
        """Count a stream, and return the tokens in each of its pieces behind the first one."""
        self.streams += 1
        fitting = LONGEST_S / self._token_s if self._token_s else 1.0
        return max(1, min(self.streams // STREAMS, int(fitting)))

    def end(self, tokens: int, seconds: float) -> None:
        """Count a stream no longer.

        Args:
            tokens: Its tokens behind the first piece.
            seconds: The time that they took.
        """
        self.streams -= 1
        if tokens > 0:
            token_s = seconds / tokens
            self._token_s += RECENT * (token_s - self._token_s) if self._token_s else token_s
