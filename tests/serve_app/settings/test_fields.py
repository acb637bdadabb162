"""`~` at the begin of a path stands for the home of the user, if there is such a user."""

from pathlib import Path

import pytest

from serve_app.settings.fields import below_home


def test_a_home_is_replaced_and_that_of_no_user_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/ada")
    assert below_home("~/models") == Path("/home/ada/models")
    assert below_home("/models") == Path("/models")
    assert below_home("~no user/models") == Path("~no user/models")
