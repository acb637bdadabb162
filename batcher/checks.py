"""Checks of arguments: ValueError, or TypeError, with the argument's name, its value and what is allowed."""

import math
from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

LARGEST = 2**53  # the largest whole number that an argument may be: up to it a float is exact too
LONGEST_S = 1e9  # the longest time, some 30 years: a timer takes no more
LATEST_S = 1e15  # the latest deadline, in either direction of zero
PRIORITIES = 2**31  # priorities lie between this and its negative
LEAST_WEIGHT, MOST_WEIGHT = 1e-6, 1e6

Check = Callable[[str, object], None]


def shown(value: object) -> str:
    """Return a value as messages show it; Python refuses to print an integer of many digits."""
    if isinstance(value, int) and value.bit_length() > 200:
        return f"a number of {value.bit_length():,} bits"
    return repr(value)


def whole(name: str, value: object, least: int, most: int = LARGEST, *, optional: bool = False) -> None:
    """Raise ValueError unless `value` is a whole number from `least` to `most`; `optional`: or None."""
    if optional and value is None:
        return
    if type(value) is not int or value < least:
        raise ValueError(f"{name} must be a whole number >= {least}, not {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be a whole number <= {most}, not {shown(value)}")


def _number(allowed: str, least: float, most: float, name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e300:
        raise ValueError(f"{name} must be a finite {allowed}, not {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:.0f}, not {shown(value)}")


seconds: Check = partial(_number, "number of seconds >= 0", 0, LONGEST_S)
instant: Check = partial(_number, "time in seconds", -LATEST_S, LATEST_S)
positive: Check = partial(_number, "number > 0", math.ulp(0.0), LONGEST_S)
weight: Check = partial(_number, f"number >= {LEAST_WEIGHT:.6f}", LEAST_WEIGHT, MOST_WEIGHT)


def _of_kind(allowed: str, kind: Any, name: str, value: object) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name} must be {allowed}, not {shown(value)}")


costs: Check = partial(_of_kind, "a sequence of costs", Iterable)
function: Check = partial(_of_kind, "a function or another callable", Callable)
flag: Check = partial(_of_kind, "True or False", bool)
tenant: Callable[[object], None] = partial(_of_kind, "a string", str, "tenant")


def weights(name: str, value: Mapping[str, float]) -> None:
    _of_kind("a mapping from tenant to weight", Mapping, name, value)
    for name_of, share in value.items():
        tenant(name_of)
        weight(f"{name}[{name_of!r}]", share)


def one_of(name: str, value: object, allowed: Collection[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}")
