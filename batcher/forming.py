"""How a batch is cut from the queue: by number, by budget, by length."""

import bisect
import itertools
import math
import operator
from typing import Any, Literal

from batcher.queue import EntryT, RequestQueue

Forming = Literal["arrival", "static", "sorted", "bucketed"]

LIKE = 1.25  # longest over shortest length that go together: padding stays near a tenth, batches still fill
LOOKAHEAD_BATCHES = 16  # how far to look ahead by default

_length = operator.attrgetter("cost")


class Former:
    """Cuts batches from a queue. The record whose turn it is goes with every batch, so that none starves.

    Args:
        forming: "arrival": in the order of the queue, while the budget lasts. "static": by number alone.
            "sorted": the records nearest in length to the record whose turn it is, among the next
            `lookahead`. "bucketed": the records in its bucket, of fixed bounds, among the next `lookahead`.
        padded, lookahead: See `DynamicBatcher`.
    """

    def __init__(self, forming: Forming, max_records: int, budget: int, padded: bool, lookahead: int) -> None:
        self._forming = forming
        self.max_records: int = max_records  # most records in a batch
        self.budget: float = math.inf if forming == "static" else budget  # most cost of one
        self.chooses: bool = forming in ("sorted", "bucketed")  # by length, which takes some time
        self.planned: list[Any] = []  # the next batch, if it was chosen ahead
        self._padded = padded
        self._lookahead = lookahead

    def full(self, records: int, cost: int) -> bool:
        """Return whether a number of waiting records, with a total cost, fills a batch."""
        return records >= self.max_records or cost >= self.budget

    def cut(self, queue: RequestQueue[EntryT]) -> list[EntryT]:
        """Take the next batch from a queue; none if nothing waits."""
        if not self.chooses:
            return queue.take(self.budget, self.max_records, padded=self._padded)
        batch, self.planned = self.planned, []
        if queue.head() not in batch or not all(entry.waiting for entry in batch):
            # Something has changed since it was planned.
            batch = self._choose(queue)
        for entry in batch:
            queue.pick(entry)
        return batch

    def plan(self, queue: RequestQueue[EntryT]) -> tuple[float, float]:
        """Choose the next batch if it is full; return how many records, or what cost, make the next try."""
        if not self.full(queue.total, queue.total_cost):
            return self.max_records, self.budget
        batch = self._choose(queue)
        longest = max(map(_length, batch), default=0)
        with_another = longest * (len(batch) + 1) if self._padded else sum(map(_length, batch)) + longest
        if len(batch) < self.max_records and with_another <= self.budget:
            return 2 * queue.total, math.inf
        self.planned = batch
        return math.inf, math.inf

    def _choose(self, queue: RequestQueue[EntryT]) -> list[EntryT]:
        window = queue.peek(self._lookahead)
        of_like_length = self._nearest if self._forming == "sorted" else self._of_one_bucket
        return of_like_length(window) if window else []

    def _nearest(self, window: list[EntryT]) -> list[EntryT]:
        """Return the run of like length around the first entry that is largest and then pads least."""
        ranked = sorted(window, key=_length)
        place = ranked.index(window[0])
        lengths = [entry.cost for entry in ranked]
        sums = list(itertools.accumulate(lengths, initial=0))
        best = (-1, 0, place + 1)
        for end in range(place + 1, min(place + self.max_records, len(ranked)) + 1):
            longest = lengths[end - 1]
            if self._padded:
                affordable = end - int(self.budget // longest) if longest else 0
            else:
                affordable = bisect.bisect_left(sums, sums[end] - self.budget)
            start = max(end - self.max_records, bisect.bisect_left(lengths, longest / LIKE), affordable)
            if start > place:
                break
            waste = longest * (end - start) - (sums[end] - sums[start])
            best = min(best, (start - end, waste, end))
        count, _, end = best
        return ranked[end + count : end]

    def _of_one_bucket(self, window: list[EntryT]) -> list[EntryT]:
        """Return the entries of the first entry's bucket, in the order of the queue, within the budget."""
        bucket = _bucket(window[0])
        alike = (entry for entry in window if _bucket(entry) == bucket)
        batch = list(itertools.islice(alike, self.max_records))
        if self._padded:
            longest = itertools.accumulate(map(_length, batch), max)
            costs = [length * count for count, length in enumerate(longest, 1)]
        else:
            costs = list(itertools.accumulate(map(_length, batch)))
        return batch[: max(1, bisect.bisect_right(costs, self.budget))]


def _bucket(entry: EntryT) -> int:
    return math.ceil(math.log(entry.cost) / math.log(LIKE)) if entry.cost > 1 else 0
