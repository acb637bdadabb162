"""Paths of values in messages."""

import pytest

from serve_app.api.validation import field_path


@pytest.mark.parametrize(
    ("parts", "root", "path"),
    [
        ((), "args", "args"),
        (("models", 0, "engine", "seed"), "args", "args.models[0].engine.seed"),
        (("messages", 3, 1, "role"), "", "messages[3][1].role"),
        ((0, "name"), "", "[0].name"),
    ],
)
def test_keys_follow_a_dot_and_indices_stand_in_brackets(
    parts: tuple[int | str, ...], root: str, path: str
) -> None:
    assert field_path(parts, root) == path
