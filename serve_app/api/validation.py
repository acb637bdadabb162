"""Paths of values in JSON and YAML, and close names, for messages about mistakes."""

import re
import types
import typing
from collections.abc import Iterable, Mapping, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ValidationError

MOST_CLOSE, FEW, SURE = 3, 8, 0.85
"""Maximum names that a message suggests, most names that it lists in full, similarity of a sure match."""

MOST_ERRORS = 1_000
"""Maximum errors of one body that are compared."""

KINDS = {"role", "type"}
"""Fields that name the kind of an object which may be of several kinds."""

MISSING = "required, but missing"

PLAIN = re.compile(r"(?!sk-)[A-Za-z_ -]{1,30}")
"""An unknown key that can be quoted where values are secrets: another text may be one in the wrong place."""

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


def kinds(annotation: Any) -> list[Any]:
    """Return the types that an annotation allows, without None and pydantic's metadata."""
    origin = typing.get_origin(annotation)
    if origin is typing.Annotated:
        return kinds(typing.get_args(annotation)[0])
    if origin in (typing.Union, types.UnionType):
        return [kind for part in typing.get_args(annotation) for kind in kinds(part)]
    return [] if annotation is type(None) else [annotation]


def sections(annotation: Any) -> list[type[BaseModel]]:
    """Return the models that an annotation allows."""
    return [kind for kind in kinds(annotation) if isinstance(kind, type) and issubclass(kind, BaseModel)]


def _walk(annotation: Any, place: Iterable[int | str]) -> tuple[list[int | str], Any]:
    """Return a place of pydantic as its author wrote it, and the type there; None: unknown.

    Args:
        annotation: The type of the whole.
        place: Keys and indices; and the kind of an object that may be of several, behind its own key.
    """
    written: list[int | str] = []
    for part in place:
        models = sections(annotation)
        tagged = [one for one in models if "kind" in one.model_fields and _is_kind(one, part)]
        if len(models) > 1 and tagged:
            annotation = tagged[0]
            continue
        written.append(part)
        inner = [typing.get_args(kind) for kind in kinds(annotation)]
        held = [arguments[0 if isinstance(part, int) else -1] for arguments in inner if arguments]
        fields = [one.model_fields[part].annotation for one in models if part in one.model_fields]
        annotation = next(iter([*fields, *held]), None)
    return written, annotation


def _is_kind(model: type[BaseModel], part: int | str) -> bool:
    return part in typing.get_args(model.model_fields["kind"].annotation)


def lines(error: ValidationError, annotation: Any, root: str = "", *, secret: bool = False) -> list[str]:
    """Return pydantic's errors about a file, a line each: the path, the expected form and the value.

    Args:
        error: The errors.
        annotation: The type that was validated.
        root: Name of the outermost value.
        secret: Whether values may be secrets, and aren't shown.
    """
    found = []
    for item in error.errors(include_url=False):
        place, _ = _walk(annotation, item["loc"])
        match item["type"]:
            case "extra_forbidden":
                *outer, key = item["loc"]
                _, section = _walk(annotation, outer)
                names = [name for one in sections(section)[:1] for name in one.model_fields]
                known = suggestion(str(key), names, "`saturate schema` has them all", "allowed here:")
                if secret and not PLAIN.fullmatch(str(key)):
                    place = place[:-1]
                text = f"unknown key{known}"
            case "missing":
                text = MISSING
            case "union_tag_invalid":
                place.append("kind")
                given = item["input"]["kind"]
                text = f"Input should be {item['ctx']['expected_tags'].replace(', ', ' or ')}, not {given!r}"
            case "value_error":
                text = str(item["ctx"]["error"])
            case _:
                text = item["msg"] if secret else f"{item['msg']}, not {item['input']!r:.400}"
        path = field_path(place, root)
        found.append(f"{path}: {text}" if path else text)
    return found


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
