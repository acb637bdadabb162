"""pydantic's errors about a config, as lines for its author."""

from collections.abc import Iterable, Mapping
from difflib import get_close_matches

from pydantic import BaseModel, ValidationError

from serve_app.api.validation import field_path

Place = tuple[int | str, ...]
Sections = Mapping[tuple[str, ...], type[BaseModel]]
"""The model of each section, by its path; the key behind "models" is a model's kind, and "*" is any key."""


MOST_CLOSE, FEW, SURE = 3, 8, 0.85
"""Most names that a message suggests, the number up to which it lists all, and the likeness of a sure one."""


def suggestion(name: str, names: Iterable[str], elsewhere: str = "", few: str = "there are") -> str:
    """Return the end of a message about an unknown name: the closest names, or all if there are few.

    Args:
        name: The unknown name.
        names: The known ones.
        elsewhere: Where they are, if none is close.
        few: Begins the list of all.
    """
    known = list(names)
    if len(known) <= FEW:
        return f"; {few} {', '.join(known) or 'none'}"
    sure = get_close_matches(name, known, n=1, cutoff=SURE)
    if close := sure or get_close_matches(name, known, n=MOST_CLOSE):
        *most, last = close
        return f"; did you mean {', '.join(most)}{' or ' * bool(most)}{last}?"
    return elsewhere and f"; {elsewhere}"


def plain_errors(error: ValidationError, root: str = "") -> str:
    """Return pydantic's errors in one line: of each the path, what is allowed, and the value."""
    errors = [(field_path(item["loc"], root), item["msg"], item["input"]) for item in error.errors()]
    return "; ".join(
        f"{path}: {message.removeprefix('Value error, ')}, not {value!r:.80}"
        for path, message, value in errors
    )


def describe_errors(error: ValidationError, sections: Sections, root: str = "args") -> str:
    """Return one line per error: its path, the value and what is allowed.

    Args:
        error: pydantic's errors.
        sections: Sections of the checked part of the config.
        root: That part's name in the config.
    """
    lines = []
    for item in error.errors():
        place = item["loc"]
        path = field_path(_as_written(place), root)
        match item["type"]:
            case "extra_forbidden":
                names = tuple(part for part in place[:-1] if isinstance(part, str))
                section = sections.get(names) or sections[(*names[:-1], "*")]
                key, elsewhere = str(place[-1]), "configs/README.md has them all"
                known = suggestion(key, section.model_fields, elsewhere, "allowed here:")
                lines.append(f"{path}: unknown key{known}")
            case "missing":
                lines.append(f"{path}: required, but missing")
            case "union_tag_invalid":
                kinds = " or ".join(repr(kind) for *_, kind in _kinds(sections))
                lines.append(f"{path}.kind: Input should be {kinds}, not {item['input']['kind']!r}")
            case "value_error":
                lines.append(f"{path}: {item['ctx']['error']}")
            case _:
                lines.append(f"{path}: {item['msg']}, not {item['input']!r}")
    count = f"{len(lines)} mistake{'s' if len(lines) > 1 else ''}"
    verb = "have" if root.endswith("s") else "has"
    return f"the config's {root} {verb} {count}:\n  " + "\n  ".join(lines)


def _as_written(place: Place) -> Place:
    """Return a place without the model's kind, which pydantic adds behind the model's index."""
    return place[:2] + place[3:] if place[:1] == ("models",) else place


def _kinds(sections: Sections) -> list[tuple[str, ...]]:
    return [place for place in sections if len(place) == 2 and place[0] == "models"]
