"""What is wrong with a config's `args`, in lines that a person can act on."""

from collections.abc import Mapping

from pydantic import BaseModel, ValidationError

Place = tuple[int | str, ...]
Sections = Mapping[tuple[str, ...], type[BaseModel]]
"""The model of each section, by the names on the way to it; behind "models" comes a model's kind."""


def explain(error: ValidationError, sections: Sections, root: str = "args") -> str:
    """Return one line per mistake: its path, the value and what is allowed.

    Args:
        error: What pydantic found.
        sections: The sections of what was checked.
        root: Its name in the config.
    """
    lines = []
    for item in error.errors():
        place = item["loc"]
        path = _path(place, root)
        match item["type"]:
            case "extra_forbidden":
                section = sections[tuple(part for part in place[:-1] if isinstance(part, str))]
                lines.append(f"{path}: unknown key; allowed here: {', '.join(section.model_fields)}")
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


def _path(place: Place, root: str) -> str:
    path = root
    for at, part in enumerate(place):
        if isinstance(part, int):
            path += f"[{part}]"
        elif at != 2 or place[0] != "models":
            # What pydantic puts behind the index of a model is its kind, which nobody wrote there.
            path += f".{part}"
    return path


def _kinds(sections: Sections) -> list[tuple[str, ...]]:
    return [place for place in sections if len(place) == 2 and place[0] == "models"]
