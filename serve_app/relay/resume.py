"""The token ids of a stream, which travel beside its text so that it can go on elsewhere if it breaks."""

from array import array
from collections.abc import Callable
from typing import Literal

Resume = Literal["", "tokens", "again"]
"""How a stream that breaks can go on: not at all; from the tokens that it has brought; by running again
from its start, which brings the same text."""

ID = "I"
"""The type code of a token id in an `array`: four bytes."""

LOST = b"\xff\xff\xff\xff"
"""The piece that stands for the rest of a stream whose engine has died."""

_WIDTH = array(ID).itemsize


class Trail:
    """What one stream of an Engine leaves behind.

    Args:
        lost: Whether the engine has died: what the application says of its answer then is no answer.

    Attributes:
        resume: How the stream could go on elsewhere; the engine says so before its first token.
    """

    __slots__ = ("_ids", "lost", "resume")

    def __init__(self, lost: Callable[[], bool]) -> None:
        self.lost = lost
        self.resume: Resume = ""
        self._ids = array(ID)

    def add(self, token_ids: list[int]) -> None:
        """Take in the next tokens; they have to be here before the application gets their text."""
        self._ids.extend(token_ids)

    def frame(self, body: bytes) -> bytes:
        """Return a piece of the body with the tokens that have come since the last one in front."""
        ids = self._ids
        framed = len(ids).to_bytes(4) + ids.tobytes() + body
        del ids[:]
        return framed


def to_ids(data: bytes) -> list[int]:
    """Return the token ids that bytes from `unframe` stand for."""
    return array(ID, data).tolist()


def unframe(piece: bytes) -> tuple[bytes, bytes]:
    """Split what `frame` returned into the bytes of the token ids and the body.

    Raises:
        EngineLostError: The piece is `LOST`.
    """
    if piece.startswith(LOST):
        raise EngineLostError
    end = 4 + _WIDTH * int.from_bytes(piece[:4])
    return piece[4:end], piece[end:]


class EngineLostError(Exception):
    """The engine died in the middle of an answer."""

    def __str__(self) -> str:
        return "its engine has died"
