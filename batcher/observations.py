"""What a batcher keeps of each record that has run, for whoever measures it."""

from collections import deque
from typing import Generic, Literal, NamedTuple, TypeVar

ItemT = TypeVar("ItemT")

Outcome = Literal["completed", "failed", "cancelled"]


class Observation(NamedTuple):
    """One record that ran.

    Attributes:
        tenant: Whose it was.
        priority: Its class.
        cost: What its tenant was charged for: prompt and output where they are known, else its cost.
        wait_s: Seconds from submission to start.
        run_s: Seconds from start to end.
        outcome: How it ended.
    """

    tenant: str
    priority: int
    cost: int
    wait_s: float
    run_s: float
    outcome: Outcome


class BatchObservation(NamedTuple):
    """One batch that was given to `process_fn`: its records and their cost."""

    size: int
    cost: int


class Kept(Generic[ItemT]):
    """The latest items, until somebody takes them; where nobody does, the oldest give way.

    Args:
        limit: Items that are kept at most.
    """

    __slots__ = ("_items", "append")

    def __init__(self, limit: int) -> None:
        self._items: deque[ItemT] = deque(maxlen=limit)
        # The deque's own method: one call per record.
        self.append = self._items.append

    def take(self) -> list[ItemT]:
        """Return what was kept since the last call."""
        items = list(self._items)
        self._items.clear()
        return items


class Observations:
    """What a batcher has observed since it was last asked.

    Args:
        limit: Records, and batches, that are kept at most.
    """

    __slots__ = ("batches", "records")

    def __init__(self, limit: int) -> None:
        self.records: Kept[Observation] = Kept(limit)
        self.batches: Kept[BatchObservation] = Kept(limit)
