"""YAML with comments: what is written is what is read."""

from typing import Any

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from serve_app.models.document import WIDTH, Item, Section, put, render

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)
keys = st.text("abcdefgh_", min_size=1)
items = st.recursive(
    st.builds(Item, plain, st.text("ab c\n")),
    lambda inner: st.builds(
        Item,
        st.one_of(
            st.dictionaries(keys, inner, min_size=1, max_size=3),
            st.lists(st.dictionaries(keys, inner, min_size=1, max_size=3), min_size=1, max_size=3),
        ),
        st.text("ab c\n"),
    ),
    max_leaves=8,
)


def values(thing: Any) -> Any:
    """Return a section without its comments."""
    if isinstance(thing, Item):
        return values(thing.value)
    if isinstance(thing, dict):
        return {key: values(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [values(value) for value in thing]
    return thing


@settings(max_examples=50)
@given(st.dictionaries(keys, items, min_size=1, max_size=3), st.text("ab c\n"))
def test_the_text_has_the_values(document: Section, head: str) -> None:
    assert yaml.safe_load(render(document, head)) == values(document)


def test_the_form_is_that_of_a_config() -> None:
    document = {
        "http": Item({"host": Item("127.0.0.1", "Only this machine."), "port": Item(8000)}),
        "models": Item(
            [{"id": Item("a", "The first."), "on": Item(True), "note": Item("1", "A text.\n  as it is")}],
            "All.",
        ),
    }
    assert (
        render(document, "About.\n   code")
        == """\
# About.
#   code

http:
  # Only this machine.
  host: 127.0.0.1
  port: 8000

# All.
models:
  # The first.
  - id: a
    on: true
    # A text.
    #  as it is
    note: "1"
"""
    )


def test_comments_are_wrapped() -> None:
    lines = render({"a": Item({"b": Item(1, "word " * 60)})}).splitlines()
    assert len(lines) > 3
    assert max(map(len, lines)) <= WIDTH
    assert all(line.startswith("  # word") for line in lines[1:-1])


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        (["a"], {"a": 9, "s": {"b": 2}}),
        (["s", "b"], {"a": 1, "s": {"b": 9}}),
        (["s", "c"], {"a": 1, "s": {"b": 2, "c": 9}}),
        (["t", "u", "v"], {"a": 1, "s": {"b": 2}, "t": {"u": {"v": 9}}}),
        (["a", "b"], {"a": {"b": 9}, "s": {"b": 2}}),
    ],
)
def test_a_value_is_put_at_its_place(place: list[str], expected: dict[str, Any]) -> None:
    section = {"a": Item(1, "First."), "s": Item({"b": Item(2)})}
    put(section, place, 9, "New.")
    assert values(section) == expected


def test_a_value_keeps_its_comment_and_a_new_one_gets_one() -> None:
    section = {"a": Item(1, "First.")}
    put(section, ["a"], 2, "New.")
    put(section, ["b"], 3, "New.")
    assert (section["a"].comment, section["b"].comment) == ("First.", "New.")
