"""The token ids of a stream. They travel beside its text, so that another Engine can go on with it."""

from array import array
from typing import Literal

ResumeMode = Literal["", "tokens", "again"]
"""How a stream that breaks can go on: not at all; from the tokens sent so far; by a second run from its
start, which gives the same text."""

ID = "I"
"""The type code of a token id in an `array`: four bytes."""


class StreamTokens:
    """The tokens of one stream that have not been sent yet.

    Attributes:
        resume: How the stream could go on elsewhere; set before its first token.
    """

    __slots__ = ("_ids", "resume")

    def __init__(self) -> None:
        self.resume: ResumeMode = ""
        self._ids = array(ID)

    def add(self, token_ids: list[int]) -> None:
        """Add the next tokens. They have to be here before the application gets their text."""
        self._ids.extend(token_ids)

    def take(self) -> bytes:
        """Return the ids of the tokens since the last call, as the bytes of an `array`."""
        ids = self._ids.tobytes()
        del self._ids[:]
        return ids


def to_ids(data: bytes) -> list[int]:
    """Return the token ids in the bytes of an `array`."""
    return array(ID, data).tolist()
