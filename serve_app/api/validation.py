"""Paths of values in JSON and YAML, and close names, for messages about mistakes."""

from collections.abc import Iterable
from difflib import get_close_matches

MOST_CLOSE, FEW, SURE = 3, 8, 0.85
"""Most names that a message suggests, most names that it lists in full, similarity of a sure match."""

MOST_LETTERS = 100
"""Most letters of an unknown name that are compared."""


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
