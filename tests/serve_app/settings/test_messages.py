"""One line per error, whatever the schema."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.settings.messages import Sections, describe_errors, suggestion


class Inner(BaseModel):
    model_config = ConfigDict(extra="forbid")

    size: int


class Outer(BaseModel):
    model_config = ConfigDict(extra="forbid")

    inner: Inner
    parts: list[Inner] = []


SECTIONS: Sections = {(): Outer, ("inner",): Inner, ("parts",): Inner}


def described(value: object, root: str = "args") -> list[str]:
    with pytest.raises(ValidationError) as caught:
        Outer.model_validate(value)
    return describe_errors(caught.value, SECTIONS, root).split("\n  ")


def test_one_error() -> None:
    assert described({"inner": {}}, "user_config") == [
        "the config's user_config has 1 mistake:",
        "user_config.inner.size: required, but missing",
    ]


def test_several_errors() -> None:
    head, *lines = described(
        {"inner": {"size": "x"}, "parts": [{"size": 1}, {"size": 2, "seize": 3}], "y": 4}
    )
    assert head == "the config's args have 3 mistakes:"
    assert lines[0].startswith("args.inner.size: Input should be a valid integer")
    assert lines[0].endswith(", not 'x'")
    assert lines[1:] == [
        "args.parts[1].seize: unknown key; allowed here: size",
        "args.y: unknown key; allowed here: inner, parts",
    ]


def test_an_unknown_name_gets_the_closest_ones_or_all_where_there_are_few() -> None:
    assert suggestion("x", []) == "; there are none"
    assert suggestion("x", ["a", "b", "c"]) == "; there are a, b, c"
    many = [f"setting_{letter}" for letter in "abcdefghij"]
    assert suggestion("seting_d", many) == "; did you mean setting_d?"
    assert suggestion("sett_a", many) == "; did you mean setting_a, setting_j or setting_i?"
    assert suggestion("set", ["sat", "sit", "sex", "bet", *many]) == "; did you mean sit, sex or sat?"
    assert suggestion("other", many) == ""
    assert suggestion("other", many, "the page has them") == "; the page has them"
