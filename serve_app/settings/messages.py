"""pydantic's errors about a config, as lines for its author."""

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

from serve_app.api.validation import field_path, suggestion

Place = tuple[int | str, ...]
Sections = Mapping[tuple[str, ...], type[BaseModel]]
"""The model of each section, by its path; the key after "models" is a model's kind, and "*" is any key."""


def plain_errors(error: ValidationError, root: str = "") -> str:
    """Return pydantic's errors in one line: for each its path, the expected form, and the value."""
    errors = [(field_path(item["loc"], root), item["msg"], item["input"]) for item in error.errors()]
    return "; ".join(
        f"{path}: {message.removeprefix('Value error, ')}, not {value!r:.80}"
        for path, message, value in errors
    )


def describe_errors(error: ValidationError, sections: Sections, root: str = "args") -> str:
    """Return one line per error: its path, the value and the expected form.

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
                key, elsewhere = str(place[-1]), "`saturate schema` has them all"
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
    """Return a place without the model's kind, which pydantic adds after the model's index."""
    return place[:2] + place[3:] if place[:1] == ("models",) else place


def _kinds(sections: Sections) -> list[tuple[str, ...]]:
    return [place for place in sections if len(place) == 2 and place[0] == "models"]
