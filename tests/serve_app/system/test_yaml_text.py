"""YAML with comments: what is written is what is read."""

from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.system.yaml_text import (
    WIDTH,
    Noted,
    NotYAMLError,
    Section,
    YAMLFormError,
    load,
    put,
    render,
    updated,
    updated_or_new,
)

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(st.characters(codec="utf-8"))
)
plain = st.recursive(
    scalars,
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(), inner, max_size=3)),
)
keys = st.text("abcdefgh_", min_size=1)
items = st.recursive(
    st.builds(Noted, plain, st.text("ab c\n")),
    lambda inner: st.builds(
        Noted,
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
    if isinstance(thing, Noted):
        return values(thing.value)
    if isinstance(thing, dict):
        return {key: values(value) for key, value in thing.items()}
    if isinstance(thing, list):
        return [values(value) for value in thing]
    return thing


@given(st.dictionaries(keys, items, min_size=1, max_size=3), st.text("ab c\n"))
def test_the_text_has_the_values(document: Section, head: str) -> None:
    assert yaml.safe_load(render(document, head)) == values(document)


def test_the_form_is_that_of_a_config() -> None:
    document = {
        "http": Noted({"host": Noted("127.0.0.1", "Only this machine."), "port": Noted(8000)}),
        "models": Noted(
            [
                {
                    "id": Noted("a", "The first."),
                    "on": Noted(True),
                    "note": Noted("1", "A text.\n  as it is"),
                }
            ],
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
    lines = render({"a": Noted({"b": Noted(1, "word " * 60)})}).splitlines()
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
    section = {"a": Noted(1, "First."), "s": Noted({"b": Noted(2)})}
    put(section, place, 9, "New.")
    assert values(section) == expected


def test_a_value_keeps_its_comment_and_a_new_one_gets_one() -> None:
    section = {"a": Noted(1, "First.")}
    put(section, ["a"], 2, "New.")
    put(section, ["b"], 3, "New.")
    assert (section["a"].comment, section["b"].comment) == ("First.", "New.")


mappings = st.dictionaries(keys, plain, max_size=4)


@given(st.dictionaries(keys, items, min_size=1, max_size=3), mappings)
def test_an_update_has_exactly_the_new_values(document: Section, change: dict[str, Any]) -> None:
    text = render(document, "About.")
    content = values(document) | change
    assert yaml.safe_load(updated_or_new(text, content)) == content


TEXT = """\
# The service.
http: {host: 127.0.0.1}   # only here

models:
  # The first.
  - id: "a"
    engine:
      length: 10  # tokens
      # Behind the length.
  - id: b
"""


def test_an_update_leaves_the_comments_of_others() -> None:
    content = yaml.safe_load(TEXT)
    content["models"][0]["engine"]["length"] = 20
    content["models"][1]["batcher"] = {"limit": 5}
    content["port"] = 80
    assert (
        updated(TEXT, content)
        == """\
# The service.
http: {host: 127.0.0.1}   # only here

models:
  # The first.
  - id: "a"
    engine:
      length: 20  # tokens
      # Behind the length.
  - id: b
    batcher:
      limit: 5
port: 80
"""
    )


def test_values_that_go_take_their_lines_along() -> None:
    content = yaml.safe_load(TEXT)
    del content["http"]
    content["models"] = content["models"][:1]
    assert yaml.safe_load(updated(TEXT, content)) == content


@pytest.mark.parametrize("text", ["", "5", "a: &x {b: 1}\nc: *x\n"])
def test_a_text_that_can_not_be_changed_in_place_is_told(text: str) -> None:
    with pytest.raises(YAMLFormError):
        updated(text, {"a": {"b": 2}, "c": {"b": 1}})


@pytest.mark.parametrize(
    ("text", "said"),
    [("a: {", "line 1"), ("[" * 2_000, "this is not YAML"), ("a: !!bool maybe", "this is not YAML")],
)
def test_what_is_not_yaml_is_told_in_one_line(text: str, said: str) -> None:
    with pytest.raises(NotYAMLError, match=said) as told:
        load(text)
    assert "\n" not in str(told.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("a: 1\nb: 2\na: 3\n", "the field 'a' in line 3 is in line 1 too"),
        ("- x: {b: 1}\n- x:\n    b: 1\n    'b': 2\n", "the field 'b' in line 4 is in line 3 too"),
        ('{"a": 1, "b": {"1": 2, "1": 3}}', "the field '1' in line 1"),
        ("5: a\n5: b\n", "the field '5' in line 2"),
        ("x" * 100 + ": 1\n" + "x" * 100 + ": 1\n", "in line 2 is in line 1 too"),
    ],
)
def test_a_field_that_stands_twice_is_told_with_its_lines(text: str, said: str) -> None:
    with pytest.raises(NotYAMLError, match=said):
        load(text)


def test_a_mapping_may_change_fields_of_another_one() -> None:
    text = "a: &a {x: 1, y: 2}\nb: &b {<<: *a, x: 3}\nc: {<<: *b, <<: *a, x: 4}\nd: {1: 1, '1': 2}\n"
    found = load(text)
    assert (found["b"], found["c"]["x"], found["d"]) == ({"x": 3, "y": 2}, 4, {1: 1, "1": 2})
