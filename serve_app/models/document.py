"""A YAML document with a comment for every value."""

import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

WIDTH = 110


@dataclass
class Item:
    """A value and its comment.

    Attributes:
        value: A section; a list of sections; or any value of YAML, which takes one line.
        comment: Paragraphs, one per line. A line that begins with a space is left as it is. Empty: the
            comment above the item before holds for this one too.
    """

    value: Any
    comment: str = ""


Section = dict[str, Item]


def is_section(value: Any) -> bool:
    """Return whether a value is a section of its own lines."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, Item) for item in value.values())


def render(document: Section, head: str = "") -> str:
    """Return a document as YAML.

    Args:
        document: Its sections.
        head: Comment at its top.
    """
    parts = [list(_comment(head, 0))] if head else []
    parts += [list(_section({key: item}, 0)) for key, item in document.items()]
    return "\n\n".join("\n".join(lines) for lines in parts) + "\n"


def lines(section: Section, depth: int = 0) -> list[str]:
    """Return the lines of a section, for another document.

    Args:
        section: The section.
        depth: Spaces before each line.
    """
    return list(_section(section, depth))


def put(section: Section, place: Sequence[str], value: Any, comment: str) -> None:
    """Set a value, in place of the one that is there.

    Args:
        section: The section.
        place: Keys down to the value; sections that are missing are made.
        value: Any value of YAML.
        comment: Comment if the value is a new one.
    """
    key, *rest = place
    if not rest:
        if key in section:
            section[key].value = value
        else:
            section[key] = Item(value, comment)
        return
    if key not in section or not is_section(section[key].value):
        section[key] = Item({}, comment)
    put(section[key].value, rest, value, comment)


def _section(section: Section, depth: int) -> Iterator[str]:
    for key, item in section.items():
        yield from _comment(item.comment, depth)
        yield from _item(key, item.value, depth)


def _item(key: str, value: Any, depth: int) -> Iterator[str]:
    space = " " * depth
    if is_section(value):
        yield f"{space}{key}:"
        yield from _section(value, depth + 2)
    elif isinstance(value, list) and value and all(map(is_section, value)):
        yield f"{space}{key}:"
        for section in value:
            yield from _entry(section, depth + 2)
    else:
        yield f"{space}{key}: {_scalar(value)}"


def _entry(section: Section, depth: int) -> Iterator[str]:
    """Yield the lines of an entry of a list: a dash before the first key, its comment above the dash."""
    (key, first), *rest = section.items()
    yield from _comment(first.comment, depth)
    head, *more = _item(key, first.value, depth + 2)
    yield f"{' ' * depth}- {head.lstrip()}"
    yield from more
    yield from _section(dict(rest), depth + 2)


def _comment(text: str, depth: int) -> Iterator[str]:
    space = " " * depth
    for paragraph in text.splitlines():
        if paragraph.startswith(" "):
            yield f"{space}#{paragraph}"
            continue
        yield from textwrap.wrap(
            paragraph,
            WIDTH,
            initial_indent=f"{space}# ",
            subsequent_indent=f"{space}# ",
            break_long_words=False,
            break_on_hyphens=False,
        )


def _scalar(value: Any) -> str:
    style = None
    if isinstance(value, str):
        # Quotes only where YAML would take the text for something else.
        plain = value.isascii() and value.isprintable() and not set(value) & set("#,[]{}'\"")
        if plain and value == value.strip() and _loads_as(value, value):
            return value
        style = '"'
    text = yaml.safe_dump(
        value, default_flow_style=True, default_style=style, width=sys.maxsize, sort_keys=False
    )
    return str(text).removesuffix("\n").removesuffix("\n...")


def _loads_as(text: str, value: str) -> bool:
    try:
        return bool(yaml.safe_load(text) == value)
    except yaml.YAMLError:
        return False
