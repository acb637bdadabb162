"""Values of options that are more than words and numbers."""

import math
from collections.abc import Callable
from typing import TypeVar

import click

ValueT = TypeVar("ValueT")


def parsed(parse: Callable[[str], ValueT]) -> Callable[..., ValueT | None]:
    """Return the callback of an option whose text is parsed."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> ValueT | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def between(least: float, most: float) -> Callable[[str], float]:
    """Return the parser of a number; neither infinity nor "nan" is one."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not least <= value <= most:
            raise ValueError(f"must be a number from {least:g} to {most:g}, not {text!r}")
        return value

    return parse
