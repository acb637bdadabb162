"""YAML as text: write configs with comments, and change values without losing a user's comments.

PyYAML reads the values, since Ray Serve reads a config with PyYAML; ruamel.yaml changes the text.
"""

import io
import string
import sys
import textwrap
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import yaml
from ruamel.yaml import YAML
from ruamel.yaml.comments import CommentedBase, CommentedMap, CommentedSeq
from ruamel.yaml.error import CommentMark, YAMLError
from ruamel.yaml.scalarstring import DoubleQuotedScalarString
from ruamel.yaml.tokens import CommentToken

WIDTH = 110
"""Maximum columns of a comment line."""


@dataclass
class Noted:
    """A value and its comment.

    Attributes:
        value: A section; a list of sections; or any YAML value, written on one line.
        comment: Paragraphs, one per line. A line that begins with a space is not wrapped. Empty: the comment
            of the previous item covers this item too.
    """

    value: Any
    comment: str = ""


Section = dict[str, Noted]


class NotYAMLError(ValueError):
    """A text is not YAML, or has a field twice; the message names the problem and its line."""


class YAMLFormError(ValueError):
    """A value can't be changed alone, for instance because two values share an anchor."""


def render(document: Section, head: str = "") -> str:
    """Return a document as YAML, with an empty line between its sections.

    Args:
        document: Its sections.
        head: Comment at the top.
    """
    root = _node(document, 0)
    for key in list(document)[1:]:
        above = root.ca.items.setdefault(key, [None, [], None, None])
        above[1] = [CommentToken("\n", CommentMark(0)), *(above[1] or [])]
    lines = "".join(f"# {line}\n" for line in _wrapped(head, 0).splitlines())
    return (f"{lines}\n" if lines else "") + _written(root)


def put(section: Section, place: Sequence[str], value: Any, comment: str) -> None:
    """Set or replace a value.

    Args:
        section: The section.
        place: Keys down to the value; missing sections are created.
        value: Any YAML value.
        comment: Comment for a new value.
    """
    key, *rest = place
    if not rest:
        if key in section:
            section[key].value = value
        else:
            section[key] = Noted(value, comment)
        return
    if key not in section or not is_section(section[key].value):
        section[key] = Noted({}, comment)
    put(section[key].value, rest, value, comment)


MAX_NAME = 100
"""Maximum characters of a name in an error."""


class _Loader(yaml.SafeLoader):
    """A reader that keeps dates as text, so that the error for an invalid date has a path.

    It refuses a field that stands twice in a mapping; YAML's readers would take the last value.
    """

    def compose_mapping_node(self, anchor: Any) -> Any:
        """Return the node of a mapping.

        Raises:
            NotYAMLError: A field stands in it twice.
        """
        node = super().compose_mapping_node(anchor)
        lines: dict[tuple[str, str], int] = {}
        for key, _ in node.value:
            # `<<` may stand there more than once.
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if first := lines.get((key.tag, key.value)):
                name = key.value[:MAX_NAME]
                raise NotYAMLError(f"the field {name!r} in line {line} is in line {first} too; keep one")
            lines[key.tag, key.value] = line
        return node


_Loader.yaml_implicit_resolvers = {
    first: [(tag, form) for tag, form in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def load(text: str) -> Any:
    """Return the values of a YAML document.

    Raises:
        NotYAMLError: The text is not YAML, or has a field twice.
    """
    try:
        return yaml.load(text, _Loader)
    except NotYAMLError:
        raise
    except yaml.MarkedYAMLError as error:
        line = f" in line {error.problem_mark.line + 1}" if error.problem_mark else ""
        raise NotYAMLError(f"this is not YAML: {error.problem}{line}") from None
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, RecursionError):
        # The other exceptions: a value of the wrong type for its tag, and lists nested too deep.
        raise NotYAMLError("this is not YAML") from None


def dump(value: Any) -> str:
    """Return a value as YAML without comments, in block style."""
    text = str(yaml.safe_dump(value, sort_keys=False, allow_unicode=True, width=sys.maxsize))
    if yaml.safe_load(text) == value:
        return text
    # PyYAML writes some Unicode line ends unescaped, and reads them as spaces.
    return str(yaml.safe_dump(value, sort_keys=False, width=sys.maxsize))


def updated(text: str, content: Any) -> str:
    """Return a text with changed values; unchanged values keep their comments, order and quotes.

    Args:
        text: A YAML document.
        content: The new values of the document.

    Raises:
        YAMLFormError: The text can't be changed in place.
        NotYAMLError: The text is not YAML.
    """
    before = load(text)
    if before == content:
        return text
    try:
        root = _yaml(text).load(text)
        if not isinstance(root, CommentedBase):
            raise YAMLFormError("the document is empty, or one value")
        _update(root, before, content)
        changed = _written(root, text)
        if load(changed) != content:
            raise YAMLFormError("two of its values are one")
    except (YAMLError, NotYAMLError, IndexError) as error:
        # ruamel.yaml 0.19 raises an IndexError for a comment above a one-line document.
        raise YAMLFormError(str(error)) from None
    return changed


def updated_or_new(text: str, content: Any) -> str:
    """Return `updated(…)`, or the content without comments if the text can't be changed in place."""
    try:
        return updated(text, content)
    except YAMLFormError:
        return dump(content)


def _update(node: Any, before: Any, after: Any) -> None:
    """Change the values of a node; `before` and `after` are both mappings or both lists."""
    if isinstance(after, list):
        for index in reversed(range(len(after), len(before))):
            del node[index]
        pairs = list(enumerate(after))
        known = range(len(before))
    else:
        for key in before.keys() - after.keys():
            del node[key]
        pairs = list(after.items())
        known = before.keys()
    for key, value in pairs:
        if key not in known:
            _add(node, key, value)
        elif before[key] == value:
            continue
        elif value and type(before[key]) is type(value) and isinstance(node[key], CommentedBase):
            _update(node[key], before[key], value)
        else:
            # In JSON the new value must be quoted too.
            old = node[key][0] if isinstance(node[key], CommentedSeq) and len(node[key]) else node[key]
            quoted = string.printable if isinstance(old, DoubleQuotedScalarString) else ""
            node[key] = _node(_in_block(value), _column(node) + 2, quoted)


def _add(node: Any, key: str | int, value: Any) -> None:
    ending, number = _last_line(node)
    new = _node(_in_block(value), _column(node) + 2)
    if isinstance(node, CommentedSeq):
        node.append(new)
    else:
        node[key] = new
    # ruamel.yaml attaches the comment above a value to the line before the value.
    if token := ending[number]:
        first, _, above = token.value.partition("\n")
        if above:
            token.value = f"{first}\n"
            ending, number = _last_line(node)
            ending[number] = CommentToken(f"\n{above}", CommentMark(0))


def _last_line(node: Any) -> tuple[list[Any], int]:
    """Return the place of the comment after the last line of a node: a list, and an index in the list."""
    key: Any = None
    while isinstance(node, CommentedMap | CommentedSeq) and len(node) and not node.fa.flow_style():
        parent, key = node, (len(node) - 1 if isinstance(node, CommentedSeq) else next(reversed(node)))
        node = parent[key]
    if key is None:
        return [None], 0
    found: list[Any] = parent.ca.items.setdefault(key, [None, None, None, None])
    return found, 0 if isinstance(parent, CommentedSeq) else 2


def _in_block(value: Any) -> Any:
    """Return a mapping as a section, which is written in block style."""
    if isinstance(value, dict) and value:
        return {key: Noted(_in_block(each)) for key, each in value.items()}
    return value


def _column(node: Any) -> int:
    # A new mapping has no column yet.
    return node.lc.col or 0


def is_section(value: Any) -> bool:
    """Return whether a value is a section, with a line per item."""
    return isinstance(value, dict) and bool(value) and all(isinstance(item, Noted) for item in value.values())


def _node(value: Any, depth: int, quoted: str = "") -> Any:
    """Return a value as a ruamel.yaml node.

    Args:
        value: A section, a list of sections, or any YAML value.
        depth: Indentation of its lines, in spaces.
        quoted: Characters that PyYAML doesn't read as text at this place.
    """
    if is_section(value):
        section = CommentedMap()
        for key, item in value.items():
            section[key] = _node(item.value, depth + 2)
            _comment(section, key, item.comment, depth)
        return section
    if isinstance(value, list) and value and all(map(is_section, value)):
        entries = CommentedSeq()
        for index, section in enumerate(value):
            # The comment of the first key goes above the dash.
            (key, first), *rest = section.items()
            entries.append(_node({key: Noted(first.value)} | dict(rest), depth + 2))
            _comment(entries, index, first.comment, depth)
        return entries
    if isinstance(value, dict):
        quoted += ":"
        flow: Any = CommentedMap(
            {_node(key, 0, quoted): _node(each, 0, quoted) for key, each in value.items()}
        )
    elif isinstance(value, list):
        flow = CommentedSeq([_node(each, 0, f"{quoted}:") for each in value])
    else:
        plain = not isinstance(value, str) or (not set(value) & set(quoted) and _is_plain(value))
        return value if plain else DoubleQuotedScalarString(value)
    flow.fa.set_flow_style()
    return flow


def _comment(node: Any, key: str | int, text: str, depth: int) -> None:
    if text.strip():
        node.yaml_set_comment_before_after_key(key, before=_wrapped(text, depth), indent=depth)


def _wrapped(text: str, depth: int) -> str:
    lines: list[str] = []
    for paragraph in text.splitlines():
        if paragraph.startswith(" "):
            lines.append(paragraph[1:])
        else:
            # The comment sign and a space take two columns.
            width = WIDTH - depth - 2
            lines += textwrap.wrap(paragraph, width, break_long_words=False, break_on_hyphens=False)
    return "\n".join(lines)


_QUOTED = set("#,[]{}?'\"")


def _is_plain(value: str) -> bool:
    """Return whether a text needs no quotes: YAML reads it as the same text."""
    if not (value.isascii() and value.isprintable() and value == value.strip()) or set(value) & _QUOTED:
        return False
    try:
        return bool(yaml.safe_load(value) == value)
    except (yaml.YAMLError, ValueError):
        return False


def _yaml(text: str = "") -> YAML:
    """Return a reader and writer with the indentation of a text; if empty, of this project's configs."""
    writer = YAML()
    writer.preserve_quotes = True
    writer.width = sys.maxsize
    lines = text.splitlines()
    entry = next((line for line in lines if line.lstrip().startswith("- ")), None)
    parent = next((line for line in lines if line.rstrip().endswith(":")), "")
    flush = entry is not None and _depth(entry) <= _depth(parent)
    writer.indent(mapping=2, sequence=2 if flush else 4, offset=0 if flush else 2)
    writer.explicit_start = text.startswith("---")
    writer.representer.add_representer(float, _represent_float)
    return writer


def _represent_float(representer: Any, value: float) -> Any:
    # PyYAML reads 5e-324 as text, and 5.0e-324 as a number.
    return representer.represent_scalar("tag:yaml.org,2002:float", yaml.safe_dump(value).splitlines()[0])


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())


def _written(root: Any, text: str = "") -> str:
    target = io.StringIO()
    _yaml(text).dump(root, target)
    return target.getvalue()
