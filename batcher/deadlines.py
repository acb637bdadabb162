"""The deadlines of the entries in a queue, the earliest first."""

import heapq
import itertools
from collections.abc import Iterator
from typing import Any, TypeVar

from batcher.entries import Entry
from batcher.fair_share import SLACK

EntryT = TypeVar("EntryT", bound=Entry[Any])


class Deadlines(list[tuple[float, int, EntryT, Any]]):
    """A heap of deadlines, each with its entry and the place of the entry.

    An entry that leaves the queue is not looked for here. Its item goes when it comes to the top, or when the
    items have doubled since they were last gone through.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sequence = itertools.count()
        self._most = SLACK

    def keep(self, deadline: float, entry: EntryT) -> None:
        """Keep the deadline of an entry that has its place."""
        heapq.heappush(self, (deadline, next(self._sequence), entry, entry._place))
        if len(self) > self._most:
            self[:] = filter(_holds, self)
            heapq.heapify(self)
            self._most = 2 * len(self) + SLACK

    def earliest(self) -> float | None:
        """Return the earliest deadline of an entry that waits."""
        while self and not _holds(self[0]):
            heapq.heappop(self)
        return self[0][0] if self else None

    def due(self, now: float) -> Iterator[EntryT]:
        """Yield the entries whose deadline has passed, which leave the queue meanwhile."""
        while self and self[0][0] <= now:
            item = heapq.heappop(self)
            if _holds(item):
                yield item[2]


def _holds(item: tuple[float, int, Entry[Any], Any]) -> bool:
    """Return whether an item is of an entry that still waits there, not in another queue."""
    return item[2]._place is item[3] and item[2].deadline == item[0]
