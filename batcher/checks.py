"""What an argument may be. Every message names the argument, its value and what is allowed."""

import math
from collections.abc import Iterable, Mapping


def whole(name: str, value: object, least: int) -> None:
    """Raise ValueError unless `value` is a whole number of at least `least`."""
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, not {value!r}")


def seconds(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite time of at least 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
        raise ValueError(f"{name} must be a finite number of seconds >= 0, not {value!r}")


def positive(name: str, value: object) -> None:
    """Raise ValueError unless `value` is a finite number above 0."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"{name} must be a finite number > 0, not {value!r}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    """Raise ValueError unless `value` is one of the strings in `allowed`."""
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {value!r}")


def function(name: str, value: object) -> None:
    """Raise TypeError unless `value` can be called."""
    if not callable(value):
        raise TypeError(f"{name} must be a function or another callable, not {value!r}")


def weights(name: str, value: Mapping[str, float] | None) -> None:
    """Raise ValueError unless every tenant's weight is a finite number above 0."""
    for tenant, weight in (value or {}).items():
        positive(f"{name}[{tenant!r}]", weight)
