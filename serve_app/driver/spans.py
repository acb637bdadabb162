"""Set of row numbers, stored as spans: a million consecutive numbers take one."""

from bisect import bisect_right


class Spans:
    """A set of mostly consecutive numbers."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []

    def __contains__(self, number: int) -> bool:
        at = bisect_right(self._starts, number) - 1
        return at >= 0 and number < self._ends[at]

    def __len__(self) -> int:
        return sum(self._ends) - sum(self._starts)

    @property
    def count(self) -> int:
        """Number of spans, which the memory is proportional to."""
        return len(self._starts)

    def copy(self) -> "Spans":
        """Return an independent copy."""
        other = Spans()
        other._starts, other._ends = self._starts.copy(), self._ends.copy()
        return other

    def add(self, number: int) -> bool:
        """Add a number; return whether it is new."""
        at = bisect_right(self._starts, number) - 1
        if at >= 0 and number < self._ends[at]:
            return False
        joins_left = at >= 0 and self._ends[at] == number
        joins_right = at + 1 < len(self._starts) and self._starts[at + 1] == number + 1
        if joins_left and joins_right:
            self._ends[at] = self._ends.pop(at + 1)
            del self._starts[at + 1]
        elif joins_left:
            self._ends[at] += 1
        elif joins_right:
            self._starts[at + 1] = number
        else:
            self._starts.insert(at + 1, number)
            self._ends.insert(at + 1, number + 1)
        return True
