"""Paths of values in messages."""

import pytest

from serve_app.api.validation import mistake, suggestion


@pytest.mark.parametrize(
    ("body", "place", "path"),
    [
        ({"messages": [[{}, {"role": 5}]]}, ("messages", 0, 1, "role"), "messages[0][1].role"),
        ([{"name": 5}], (0, "name"), "[0].name"),
        ({}, (), ""),
    ],
)
def test_keys_follow_a_dot_and_indices_stand_in_brackets(
    body: object, place: tuple[int | str, ...], path: str
) -> None:
    found, reason = mistake([{"type": "string_type", "loc": place, "msg": "must be a text"}], body)
    assert (found, reason) == (path, f"{path}: must be a text" if path else "must be a text")


def test_an_unknown_name_gets_the_closest_ones_or_all_where_there_are_few() -> None:
    assert suggestion("x", []) == "; there are none"
    assert suggestion("x", ["a", "b", "c"]) == "; there are a, b, c"
    many = [f"setting_{letter}" for letter in "abcdefghij"]
    assert suggestion("seting_d", many) == "; did you mean setting_d?"
    assert suggestion("sett_a", many) == "; did you mean setting_a, setting_j or setting_i?"
    assert suggestion("set", ["sat", "sit", "sex", "bet", *many]) == "; did you mean sit, sex or sat?"
    assert suggestion("other", many) == ""
    assert suggestion("other", many, "the page has them") == "; the page has them"
