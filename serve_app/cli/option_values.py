"""Parsers of option values beyond words and numbers."""

import re
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

import click

ValueT = TypeVar("ValueT")

UNITS = {"m": "minutes", "h": "hours", "d": "days", "w": "weeks"}


def parsed(parse: Callable[[str], ValueT]) -> Callable[..., ValueT | None]:
    """Return the callback of an option that parses its text."""

    def callback(context: click.Context, parameter: click.Parameter, value: str | None) -> ValueT | None:
        try:
            return None if value is None else parse(value)
        except ValueError as error:
            raise click.BadParameter(str(error)) from None

    return callback


def check_folder(option: str, file: Path | None) -> None:
    """Check, before the work starts, that the folder of an option's file exists.

    Raises:
        click.UsageError: The folder doesn't exist.
    """
    if file is not None and not file.absolute().parent.is_dir():
        raise click.UsageError(f"{option} {file}: there is no folder {file.parent}")


def parse_time(text: str) -> datetime:
    """Return a time in UTC from a text: a duration before now, or a date.

    Raises:
        ValueError: The text is neither.
    """
    try:
        if match := re.fullmatch(r"(\d{1,6})([mhdw])", text):
            return datetime.now(UTC) - timedelta(**{UNITS[match[2]]: int(match[1])})
        found = datetime.fromisoformat(text)
        return found.astimezone(UTC) if found.tzinfo else found.replace(tzinfo=UTC)
    except (ValueError, OverflowError):
        message = f"{text!r} is not a time; write 90m, 24h, 7d, 4w, or 2026-11-01, or 2026-11-01T12:00"
        raise ValueError(message) from None
