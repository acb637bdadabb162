"""Paths of values in JSON and YAML, for messages about pydantic's errors."""

from collections.abc import Iterable


def field_path(parts: Iterable[int | str], root: str = "") -> str:
    """Return the path of a value, such as `models[0].engine.seed`.

    Args:
        parts: Keys and indices from the outside in, as in pydantic's `loc`.
        root: Name of the outermost value.
    """
    path = root + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in parts)
    return path if root else path.removeprefix(".")
