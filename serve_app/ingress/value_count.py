"""Bound on the values in a JSON text, checked before anything parses it."""

import re

from serve_app.api.errors import RequestError

_ESCAPES = (b"\\\\", b'\\"')
_NUMBERS = b"-+.eE0123456789 \t\r\n"
_LIST_OF_NUMBERS = re.compile(rb"\[,+\]")

NUMBERS = 10
"""Numbers of lists that weigh as much as one other value where prompts in tokens may stand: a million of them
hold an Engine's event loop for a tenth of a second."""


def check_values(body: bytes, most: int, numbers: int = NUMBERS) -> None:
    """Raise if a JSON text has too many values; a list of numbers alone counts as one.

    A parser makes an object of each value, with the interpreter's lock held: 32 MiB of empty lists take it
    seconds and a gigabyte.

    Args:
        body: The text; what is wrong with it is not found here.
        most: Most values; of numbers in lists `numbers` times as many.
        numbers: 1: a number counts as any other value.

    Raises:
        RequestError: 400, it has more.
    """
    if is_within(body, most, numbers):
        return
    lists = f", or more than {numbers * most} numbers in lists" if numbers > 1 else ""
    message = f"The body has more than {most} values{lists} (ingress.max_values); send it in several calls"
    raise RequestError(400, "invalid_request_error", message)


def is_within(text: bytes, most: int, numbers: int = NUMBERS) -> bool:
    """Return whether a JSON text has no more values than allowed; see `check_values`."""
    if count_values(text) <= most:
        # The usual case: even with the commas of its texts it is within the bound.
        return True
    for escape in _ESCAPES:
        text = text.replace(escape, b"")
    # A value is one text at most, and has one more as its name.
    if text.count(b'"') > 4 * most:
        return False
    text = b'"'.join(text.split(b'"')[::2])
    if numbers > 1:
        if text.count(b"[") + text.count(b"{") > most or text.count(b",") > numbers * most:
            return False
        text = _LIST_OF_NUMBERS.sub(b"[", text.translate(None, _NUMBERS))
    return count_values(text) <= most


def count_values(text: bytes) -> int:
    """Return how many values a text has, or more."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
