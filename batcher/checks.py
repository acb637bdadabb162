"""Checks of arguments: ValueError, or TypeError, with the argument's name, its value and what is allowed."""

import math
from collections.abc import Callable, Iterable, Mapping
from functools import partial

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
    """Raise ValueError unless `value` is a finite number from `least` to `most`."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not least <= value < 1e300:
        raise ValueError(f"{name} must be a finite {allowed}, not {shown(value)}")
    if value > most:
        raise ValueError(f"{name} must be at most {most:.0f}, not {shown(value)}")


seconds: Check = partial(_number, "number of seconds >= 0", 0, LONGEST_S)
instant: Check = partial(_number, "time in seconds", -LATEST_S, LATEST_S)
positive: Check = partial(_number, "number > 0", math.ulp(0.0), LONGEST_S)


def tenant(value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"tenant must be a string, not {shown(value)}")


def one_of(name: str, value: object, allowed: Iterable[str]) -> None:
    allowed = tuple(allowed)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, not {shown(value)}")


def function(name: str, value: object) -> None:
    if not callable(value):
        raise TypeError(f"{name} must be a function or another callable, not {shown(value)}")


def flag(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} must be True or False, not {shown(value)}")


def weight(name: str, value: object) -> None:
    _number("number > 0", math.ulp(0.0), MOST_WEIGHT, name, value)
    if value < LEAST_WEIGHT:  # type: ignore[operator]
        raise ValueError(f"{name} must be at least {LEAST_WEIGHT:.6f}, not {shown(value)}")


def weights(name: str, value: Mapping[str, float]) -> None:
    if not isinstance(value, Mapping):
        raise TypeError(f"{name} must be a mapping from tenant to weight, not {shown(value)}")
    for name_of, share in value.items():
        tenant(name_of)
        weight(f"{name}[{name_of!r}]", share)
