"""How many records are let into an engine beyond its places, so that none stays empty."""

import math

STEPS = 2
"""Steps between the end of a record and the first step of one that is only then let in: the end is told
with one step, and the next is planned by then."""

FIRST_OUTPUT = 64.0
"""Tokens that a record is thought to produce before one has ended."""

MEMORY = 1 - 1 / 64
"""Weight that a record keeps in the mean output when the next one ends."""


class Lead:
    """Says how many records may wait in an engine for the places of those that end.

    A record stays a step per token, so by Little's law `places / mean output` of them end in a step. As
    many wait in the engine as end until others could come: more would only have left the queue, and its
    order, too early.

    Attributes:
        places: Records in one step of the engine.
        records: How many may wait, at most as many as there are places.
    """

    __slots__ = ("_ended", "_tokens", "places", "records")

    def __init__(self, places: int) -> None:
        self.places = places
        self._ended = 1.0
        self._tokens = FIRST_OUTPUT
        self.records = self._count()

    def learn(self, output_tokens: int) -> None:
        """Take in what a record that has ended produced; 0 counts as one step."""
        self._ended = self._ended * MEMORY + 1
        self._tokens = self._tokens * MEMORY + max(1, output_tokens)
        self.records = self._count()

    def _count(self) -> int:
        return min(self.places, math.ceil(STEPS * self.places * self._ended / self._tokens))
