"""Paths of values in JSON and YAML, and close names, for messages about mistakes."""

from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

MOST_CLOSE, FEW, SURE = 3, 8, 0.85
"""Maximum names that a message suggests, most names that it lists in full, similarity of a sure match."""

MOST_ERRORS = 1_000
"""Maximum errors of one body that are compared."""

KINDS = {"role", "type"}
"""Fields that name the kind of an object which may be of several kinds."""

MISSING = "required, but missing"

MOST_LETTERS = 100
"""Maximum letters of an unknown name that are compared."""


def suggestion(name: str, names: Iterable[str], elsewhere: str = "", few: str = "there are") -> str:
    """Return the end of a message about an unknown name: the closest names, or all if there are few.

    Args:
        name: The unknown name.
        names: The known names.
        elsewhere: Where the names are listed, if no name is close.
        few: Beginning of the list of all names.
    """
    # Clients choose the name, and its comparison must be cheap.
    name, known = name[:MOST_LETTERS], list(names)
    if len(known) <= FEW:
        return f"; {few} {', '.join(known) or 'none'}"
    sure = get_close_matches(name, known, n=1, cutoff=SURE)
    if close := sure or get_close_matches(name, known, n=MOST_CLOSE):
        *most, last = close
        return f"; did you mean {', '.join(most)}{' or ' * bool(most)}{last}?"
    return elsewhere and f"; {elsewhere}"


def is_port(value: object) -> bool:
    """Return whether a value is a port that a program can listen on."""
    # YAML's `true` is an int to Python, and would be port 1.
    return type(value) is int and 0 < value < 65536


def field_path(parts: Iterable[int | str], root: str = "") -> str:
    """Return the path of a value, such as `models[0].engine.seed`.

    Args:
        parts: Keys and indices from the outside in, as in pydantic's `loc`.
        root: Name of the outermost value.
    """
    path = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path if root else path.removeprefix(".")


def mistake(errors: Sequence[Mapping[str, Any]], body: Any) -> tuple[str, str]:
    """Return the path of a wrong field and the reason, by pydantic's errors about a body.

    A value that may have several forms has errors for each form. The forms of another kind don't count. Among
    the other errors, the errors of the innermost field count, and a wrong field before a missing field.

    Args:
        errors: The errors, at least one.
        body: The body that was validated. The place of an error also names the forms that pydantic has tried;
            the body tells them from fields.

    Returns:
        The path, empty for the whole body, and a sentence that begins with it.
    """
    errors = errors[:MOST_ERRORS]
    others = {
        error["loc"][:-1]
        for error in errors
        if error["type"] in ("literal_error", "missing") and error["loc"] and error["loc"][-1] in KINDS
    }
    left = [
        error for error in errors if not any(error["loc"][:end] in others for end in range(len(error["loc"])))
    ]
    found = [(_fields(error, body), _reason(error)) for error in left or errors]
    fields, _ = max(found, key=lambda one: (len(one[0]), one[1] != MISSING))
    # The same mistake may have a reason for each form.
    first, *more = dict.fromkeys(reason for each, reason in found if each == fields)
    reason = " or ".join([first, *(each.removeprefix("Input should be ") for each in more)])
    path = field_path(fields)
    return path, f"{path}: {reason}" if path else reason


def _fields(error: Mapping[str, Any], body: Any) -> list[int | str]:
    """Return the fields and indices that lead to the place of an error."""
    fields: list[int | str] = []
    value = body
    for part in error["loc"]:
        known = isinstance(value, Mapping) and part in value
        if known or (isinstance(value, list) and isinstance(part, int) and part < len(value)):
            value = value[part]
            fields.append(part)
    if error["type"] == "missing" and error["loc"]:
        fields.append(error["loc"][-1])
    return fields


def _reason(error: Mapping[str, Any]) -> str:
    if error["type"] == "missing":
        return MISSING
    return str(error["ctx"]["error"] if error["type"] == "value_error" else error["msg"])
