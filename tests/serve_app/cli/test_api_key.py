"""The API key in an environment variable."""

import click
import pytest

from serve_app.cli.api_key import read_api_key


def test_without_a_name_there_is_no_key() -> None:
    assert read_api_key(None) is None


def test_the_key_is_that_of_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_KEY", "sk-1")
    assert read_api_key("LLM_KEY") == "sk-1"


def test_a_variable_that_is_missing_or_empty_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LLM_KEY", raising=False)
    with pytest.raises(click.UsageError, match="--api-key-env LLM_KEY: no such variable in the environment"):
        read_api_key("LLM_KEY")
    monkeypatch.setenv("LLM_KEY", "")
    with pytest.raises(click.UsageError, match="LLM_KEY"):
        read_api_key("LLM_KEY")
