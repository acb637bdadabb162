"""The text of a config with the variables that it leaves out: the config's own lines and comments stay."""

from collections.abc import Iterator, Sequence
from itertools import chain

import yaml

from serve_app.api.protocol import JSON
from serve_app.models.document import Item, Section, lines
from serve_app.models.variables import variable_section
from serve_app.settings.completion import complete_config, missing_variables
from serve_app.settings.environment import CONTROLLER, REPLICAS, Variable

PLACE = ("runtime_env", "env_vars")
"""The place of the variables in `controller_options` and in an application."""


class _NoPlaceError(Exception):
    """A part of the config is not written as a block, so that no line can be added to it."""


def completed(text: str) -> str:
    """Return a config with the variables that it leaves out, each with a comment.

    Where a line can't be added, as in `{...}` on one line, all of it is written anew, without comments.

    Args:
        text: A valid Serve config, as YAML.

    Raises:
        yaml.YAMLError: It is no YAML.
    """
    content: JSON = yaml.safe_load(text)
    if not missing_variables(content):
        return text
    whole = complete_config(content)
    try:
        written = _with_lines(text, content)
        if yaml.safe_load(written) == whole:
            return written
    except (_NoPlaceError, yaml.YAMLError):
        pass
    return str(yaml.safe_dump(whole, sort_keys=False))


def _with_lines(text: str, content: JSON) -> str:
    """Return the text with lines for the variables.

    Raises:
        _NoPlaceError: There is no place for them.
    """
    missing = missing_variables(content)
    old = text.splitlines()
    root = _block(yaml.compose(text, Loader=yaml.SafeLoader))
    added: dict[int, list[str]] = {}
    if missing.controller:
        number, new = _controller_lines(root, missing.controller, old)
        added[number] = new
    applications = _value(root, "applications")
    for index, variables in missing.applications.items():
        if variables:
            assert isinstance(applications, yaml.SequenceNode)
            number, new = _application_lines(_block(applications.value[index]), variables, old)
            added[number] = new
    merged = chain.from_iterable([*added.get(number, ()), *line] for number, line in _numbered(old))
    return "\n".join(merged) + "\n"


def _numbered(old: Sequence[str]) -> Iterator[tuple[int, list[str]]]:
    """Yield each line with its number, and the end of the text as a line without content."""
    yield from ((number, [line]) for number, line in enumerate(old))
    yield len(old), []


def _controller_lines(
    root: yaml.MappingNode, variables: Sequence[Variable], old: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the lines for the controller, and the number of the line that they come before."""
    key = "controller_options"
    if _value(root, key) is not None:
        return _lines_inside(root, (key, *PLACE), variables, old)
    section = {key: Item(_nested(PLACE, variables), CONTROLLER)}
    first = root.value[0][0].start_mark.line
    above = _comment_start(first, old)
    if above == 0 and first > 0:
        # The comment is that of the whole file.
        return first, ["", *lines(section), ""]
    return above, [*lines(section), ""]


def _application_lines(
    app: yaml.MappingNode, variables: Sequence[Variable], old: Sequence[str]
) -> tuple[int, list[str]]:
    """Return the lines for an application, and the number of the line that they come before."""
    if _value(app, PLACE[0]) is not None:
        return _lines_inside(app, PLACE, variables, old)
    # The first key shares its line with the dash of the list.
    keys = {key.value: key.start_mark.line for key, _ in app.value[1:]}
    if not keys:
        raise _NoPlaceError
    place = keys.get("args", min(keys.values()))
    section = {PLACE[0]: Item(_nested(PLACE[1:], variables), REPLICAS)}
    return _comment_start(place, old), lines(section, app.start_mark.column)


def _lines_inside(
    node: yaml.MappingNode, path: Sequence[str], variables: Sequence[Variable], old: Sequence[str]
) -> tuple[int, list[str]]:
    """Return lines for a part that is there, at the beginning of the innermost section of a path."""
    rest = list(path)
    while rest and (value := _value(node, rest[0])) is not None:
        node = _block(value)
        del rest[0]
    section = _nested(rest, variables)
    return _comment_start(node.start_mark.line, old), lines(section, node.start_mark.column)


def _nested(path: Sequence[str], variables: Sequence[Variable]) -> Section:
    section = variable_section(variables)
    for key in reversed(path):
        section = {key: Item(section)}
    return section


def _comment_start(number: int, old: Sequence[str]) -> int:
    """Return the first line of the comment right above a line, or the line itself."""
    while number > 0 and old[number - 1].lstrip().startswith("#"):
        number -= 1
    return number


def _value(node: yaml.MappingNode, key: str) -> yaml.Node | None:
    return next((value for one, value in node.value if one.value == key), None)


def _block(node: yaml.Node | None) -> yaml.MappingNode:
    if isinstance(node, yaml.MappingNode) and node.value and not node.flow_style:
        return node
    raise _NoPlaceError
