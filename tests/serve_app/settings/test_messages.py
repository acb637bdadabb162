"""One line per error, whatever the schema."""

import pytest
from pydantic import BaseModel, ConfigDict, ValidationError

from serve_app.settings.messages import Sections, describe_errors


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
