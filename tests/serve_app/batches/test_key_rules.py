"""Models and limits that API keys allow to their batches."""

import json
from pathlib import Path
from typing import Any

from serve_app.auth.keys import hash_key
from serve_app.auth.middleware import KeyStore
from serve_app.batches.key_rules import KeyRules
from serve_app.batches.limits import Limits
from serve_app.settings.ingress import AccessSettings

SERVED = {"demo", "large"}


def rules(folder: Path, **fields: Any) -> KeyRules:
    """Return the rules of a service with the key `ada`."""
    path = folder / "keys.json"
    path.write_text(json.dumps([{"name": "ada", "sha256": hash_key(b"x"), "tenant": "research"} | fields]))
    return KeyRules(SERVED, Limits(max_lines=100), KeyStore(AccessSettings(keys_file=str(path))))


def test_a_key_with_models_names_the_served_ones_among_them(tmp_path: Path) -> None:
    found = rules(tmp_path, models=["demo", "other"])
    assert set(found.models("ada")) == {"demo"}
    # A key that is gone leaves its batches as they are.
    assert set(found.models("gone")) == set(found.models("")) == SERVED


def test_the_limits_of_a_key_go_before_those_of_the_config(tmp_path: Path) -> None:
    found = rules(tmp_path, batches={"max_lines": 7, "max_open_batches": 1})
    assert found.limits("ada") == Limits(max_lines=7, max_open_batches=1)
    assert found.limits("gone") == found.limits("") == found.common == Limits(max_lines=100)


def test_a_key_without_rules_has_those_of_all(tmp_path: Path) -> None:
    found = rules(tmp_path)
    assert set(found.models("ada")) == SERVED
    assert found.limits("ada") == Limits(max_lines=100)
    assert KeyRules(SERVED).limits("ada") == Limits()
