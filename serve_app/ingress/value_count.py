"""Bound on the values in a JSON text, checked before anything parses it."""

import re

from serve_app.api.errors import RequestError

_ESCAPES = (b"\\\\", b'\\"')
_NUMBERS = b"-+.eE0123456789 \t\r\n"
_LIST_OF_NUMBERS = re.compile(rb"\[,+\]")


NUMBERS = 50
"""Numbers of lists that weigh as much as one other value: those of prompts in tokens may be millions."""


def check_values(body: bytes, most: int) -> None:
    """Raise if a JSON text has too many values; a list of numbers alone counts as one.

    A parser makes an object of each value, with the interpreter's lock held: 32 MiB of empty lists take it
    seconds and a gigabyte.

    Args:
        body: The text; what is wrong with it is not found here.
        most: Most values; of numbers in lists `NUMBERS` times as many.

    Raises:
        RequestError: 400, it has more.
    """
    if count_values(body) <= most:
        # The usual case: even with the commas of its texts it is within the bound.
        return
    for escape in _ESCAPES:
        body = body.replace(escape, b"")
    # A value is one text at most, and has one more as its name.
    if body.count(b'"') <= 4 * most:
        body = b'"'.join(body.split(b'"')[::2])
        if body.count(b"[") + body.count(b"{") <= most and body.count(b",") <= NUMBERS * most:
            body = _LIST_OF_NUMBERS.sub(b"[", body.translate(None, _NUMBERS))
            if count_values(body) <= most:
                return
    message = (
        f"The body has more than {most} values, or more than {NUMBERS * most} numbers in lists "
        "(ingress.max_values); send it in several calls"
    )
    raise RequestError(400, "invalid_request_error", message)


def count_values(text: bytes) -> int:
    """Return how many values a text has, or more."""
    return text.count(b",") + text.count(b"[") + text.count(b"{")
