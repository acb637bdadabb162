"""How many tokens of a stream travel together."""

MEMORY = 1 - 1 / 32
"""Weight that a finished stream keeps when the next one finishes."""


class Pace:
    """Bounds the pieces per second that a replica sends, over all of its streams together.

    A piece costs the same on its way whether it holds one token or eight: its JSON, its message
    between two processes, its write to a socket. So the more streams there are, the more tokens
    travel together. The first token of a stream never waits, and with few streams no token does.

    Args:
        pieces_per_s: Pieces per second that a replica may send in total.
        most: Tokens that travel together at most.
    """

    __slots__ = ("_most", "_pieces_per_s", "_seconds", "_tokens", "streams")

    def __init__(self, pieces_per_s: float = 1_000.0, most: int = 32) -> None:
        self._pieces_per_s = pieces_per_s
        self._most = most
        self._tokens = 0.0
        self._seconds = 0.0
        self.streams = 0
        """Streams that are being sent now."""

    def tokens_per_piece(self) -> int:
        """Return how many tokens of a stream that starts now travel together."""
        if not self._seconds:
            return 1
        tokens_per_s = self.streams * self._tokens / self._seconds
        return max(1, min(round(tokens_per_s / self._pieces_per_s), self._most))

    def learn(self, tokens: int, seconds: float) -> None:
        """Take in a stream that has ended.

        Args:
            tokens: Those after its first.
            seconds: From its first token to its last.
        """
        self._tokens = self._tokens * MEMORY + tokens
        self._seconds = self._seconds * MEMORY + seconds
