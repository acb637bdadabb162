"""The cost of a record: given, estimated by a function or by the record itself, or learned."""

import contextlib
import math
import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar, runtime_checkable

from batcher import checks

RecordT = TypeVar("RecordT")
CostEstimatorFn = Callable[[RecordT], int]
TokenEstimatorFn = Callable[[RecordT], int]


@runtime_checkable
class CostEstimator(Protocol):
    """A record that knows what it costs."""

    def estimate_cost(self) -> int: ...


@runtime_checkable
class TokenEstimator(Protocol):
    """A record that knows how many tokens it has."""

    def estimate_tokens(self) -> int: ...


@dataclass
class Prompt:
    """A `text` that estimates its tokens as a quarter of its characters, plus one."""

    text: str

    def estimate_tokens(self) -> int:
        return len(self.text) // 4 + 1


def whole_cost(name: str, value: object) -> int:
    """Return a cost as a whole number, fractions rounded up; raise ValueError for another value."""
    if type(value) is int and 0 <= value <= checks.LARGEST:
        return value
    cost = -1
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        cost = math.ceil(value) if isinstance(value, float) else operator.index(value)  # type: ignore[arg-type]
    if cost < 0 or isinstance(value, bool):
        raise ValueError(f"{name} must be a finite number >= 0, not {checks.shown(value)}")
    if cost > checks.LARGEST:
        raise ValueError(f"{name} must be at most {checks.LARGEST}, not {checks.shown(value)}")
    return cost


def cost_of(estimator: CostEstimatorFn[Any] | None, methods: Iterable[str], default: int, record: Any) -> int:
    """Return the cost of a record, by `estimator`, or else by the first method that it has, or `default`."""
    if estimator is not None:
        return whole_cost("cost_estimator's result", estimator(record))
    for name in methods:
        if callable(method := getattr(record, name, None)):
            return whole_cost(f"{name}()'s result", method())
    return default


class OutputEstimator:
    """Learns from finished requests how many tokens one will produce: E[length | length > so_far]."""

    BUCKETS = 32
    ENOUGH = 32  # requests to see first: the earliest to finish are the shortest, their mean is too low
    MEMORY = 1024  # requests after which the past weighs half

    def __init__(self) -> None:
        # Requests by bucket, a power of two, and their tokens; bucket 0, that of no tokens, has all of them.
        self._counts = [0.0] * self.BUCKETS
        self._sums = [0.0] * self.BUCKETS

    def learn(self, output_tokens: int) -> None:
        """Take in the length of a finished request, in tokens."""
        for bucket in {0, min(output_tokens.bit_length(), self.BUCKETS - 1)}:
            self._counts[bucket] += 1
            self._sums[bucket] += output_tokens
        if self._counts[0] >= self.MEMORY:
            self._counts = [count / 2 for count in self._counts]
            self._sums = [total / 2 for total in self._sums]

    def expect(self, max_tokens: int, so_far: int = 0) -> int:
        """Return the tokens to reserve for a request that has produced `so_far`, of `max_tokens` at most."""
        if self._counts[0] < self.ENOUGH:
            return max_tokens
        if so_far == 0:
            return min(max_tokens, math.ceil(self._sums[0] / self._counts[0]))
        first = min(so_far.bit_length(), self.BUCKETS - 1)
        seen = sum(self._counts[first:])
        mean = math.ceil(sum(self._sums[first:]) / seen) if seen else 0
        # Beyond everything seen, double: few corrections, never more than twice too much.
        return min(max_tokens, mean if mean > so_far else 2 * so_far)
