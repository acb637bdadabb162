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
    """A record that knows its cost."""

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
