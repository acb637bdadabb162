"""Configs for the tests of settings, and the mistakes that are found in them."""

from typing import Any

import pytest

from serve_app.api.protocol import JSON
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import SettingsError, parse


def one(**fields: Any) -> JSON:
    """Return args with one language model."""
    return {"models": [{"id": "demo", "source": "x"} | fields]}


def function(**fields: Any) -> JSON:
    """Return args with one function model."""
    return {"models": [{"id": "rank", "kind": "function", "target": "a.b:C"} | fields]}


def only(args: JSON) -> LLMSettings:
    """Return the one model, which is a language model."""
    (model,) = parse(args).models
    assert isinstance(model, LLMSettings)
    return model


def mistakes(args: Any) -> list[str]:
    """Return the lines of the error that the args cause, one for each mistake."""
    with pytest.raises(SettingsError) as caught:
        parse(args)
    head, *lines = str(caught.value).split("\n  ")
    count = len(lines)
    assert head == f"the config's args have {count} mistake{'s' if count > 1 else ''}:"
    return lines
