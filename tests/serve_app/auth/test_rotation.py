"""Rotation of a key's secret in the text of a keys file."""

import json
import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from serve_app.auth.keys import Key, read_keys
from serve_app.auth.rotation import RotationError, add_secret, drop_old_secret, entry_of
from serve_app.settings.schema import SettingsError

OLD, NEW, OTHER = "a" * 64, "b" * 64, "c" * 64
FILE = f"""\
# The keys of the team.
- name: ada            # on the third floor
  sha256: {OLD}  # of March
  tenant: research
  expires: 2027-01-31

- name: bob
  sha256: {OTHER}
  tenant: batch        # nightly
"""


def keys_of(text: str) -> dict[str, Key]:
    return {key.name: key for key in read_keys(text, "keys.yaml")}


def narrow(text: str) -> str:
    """Return a text with one space before each comment."""
    return re.sub(" +#", " #", text)


def test_a_new_secret_stands_beside_the_old_one_and_comments_stay() -> None:
    both = add_secret(FILE, "ada", NEW)
    assert narrow(both) == narrow(FILE.replace(OLD, f"[{OLD}, {NEW}]"))
    assert keys_of(both)["ada"].hashes == (OLD, NEW)
    assert narrow(drop_old_secret(both, "ada")) == narrow(FILE.replace(OLD, NEW))


@pytest.mark.parametrize(
    "text",
    [
        json.dumps([{"name": "ada", "sha256": OLD, "tenant": "x"}]),
        json.dumps([{"sha256": [OLD], "tenant": "x", "name": "ada"}], indent=2),
        f"- {{name: ada, sha256: '{OLD}', tenant: é}}",
        f"- name: ada\n  tenant: x\n  sha256: {OLD}",
        f"- name: ada\r\n  sha256: {OLD}\r\n  tenant: x\r\n",
        f"- name: ada\n  sha256:\n    - {OLD}  # March\n  # here\n  tenant: x\n",
        f"- name: ada\n  sha256:\n  - {OLD}\n  tenant: x\n",
        f"- name: ada\n  sha256: >-\n    {OLD}\n  tenant: x\n",
        f"- {{name: bob, tenant: x, sha256: {OTHER}}}\n- tenant: x\n  sha256: {OLD}\n  <<: {{name: ada}}\n",
        f"- name: ada\n  tenant: x\n  <<: {{sha256: {OLD}}}\n",
        f"- &x {{name: bob, sha256: {OTHER}, tenant: x}}\n- <<: *x\n  name: ada\n  sha256: {OLD}\n",
    ],
    ids=[
        "JSON",
        "JSON in lines",
        "one line",
        "no last line end",
        "CRLF",
        "list",
        "flat list",
        "folded",
        "merged name",
        "merged hash",
        "merged",
    ],
)
def test_an_entry_of_any_form_is_rotated(text: str) -> None:
    before = keys_of(text)
    both = keys_of(add_secret(text, "ada", NEW))
    assert both["ada"].hashes == (OLD, NEW)
    after = keys_of(drop_old_secret(add_secret(text, "ada", NEW), "ada"))
    assert after["ada"].hashes == (NEW,)
    for found in (both, after):
        assert {name: key.model_copy(update={"sha256": ""}) for name, key in found.items()} == {
            name: key.model_copy(update={"sha256": ""}) for name, key in before.items()
        }


def test_json_stays_json() -> None:
    text = json.dumps([{"name": "ada", "sha256": OLD, "tenant": "x"}])
    both = add_secret(text, "ada", NEW)
    assert json.loads(both)[0]["sha256"] == [OLD, NEW]
    assert json.loads(drop_old_secret(both, "ada"))[0]["sha256"] == NEW


def test_an_entry_that_can_not_be_changed_in_place_is_left_and_said_so() -> None:
    # ruamel.yaml can't write a comment above a document in one line.
    text = f"# keys\n[{{name: ada, sha256: {OLD}, tenant: x}}]\n"
    with pytest.raises(RotationError, match="by hand"):
        add_secret(text, "ada", NEW)


def test_a_key_with_two_secrets_gets_no_third() -> None:
    both = add_secret(FILE, "ada", NEW)
    with pytest.raises(RotationError, match=r"has two secrets already.*--finish"):
        add_secret(both, "ada", "d" * 64)


def test_the_only_secret_of_a_key_is_not_dropped() -> None:
    with pytest.raises(RotationError, match="the key ada has one secret"):
        drop_old_secret(FILE, "ada")


@pytest.mark.parametrize(
    "change", [lambda text: add_secret(text, "eve", NEW), lambda text: drop_old_secret(text, "eve")]
)
def test_an_unknown_key_is_an_error(change: Any) -> None:
    with pytest.raises(RotationError, match="no key named eve"):
        change(FILE)


def test_a_wrong_file_and_a_hash_of_another_key_are_refused() -> None:
    with pytest.raises(SettingsError, match="must be a list"):
        add_secret("{}", "ada", NEW)
    with pytest.raises((SettingsError, RotationError)):
        add_secret(FILE, "ada", OTHER)


def test_the_changed_entry_is_one_for_a_keys_file() -> None:
    entry = entry_of(add_secret(FILE, "ada", NEW), "ada")
    assert list(keys_of(entry)) == ["ada"]
    assert keys_of(entry)["ada"] == keys_of(add_secret(FILE, "ada", NEW))["ada"]


@given(
    steps=st.lists(st.tuples(st.sampled_from(["ada", "bob", "eve"]), st.booleans()), max_size=6),
    flow=st.sampled_from([None, True, False]),
)
def test_rotation_locks_no_secret_out_but_the_old_one_that_is_dropped(
    steps: list[tuple[str, bool]], flow: bool | None
) -> None:
    entries = [
        {"name": name, "sha256": f"{number:064x}", "tenant": name}
        for number, name in enumerate(("ada", "bob", "eve"))
    ]
    text = "# keys\n" + yaml.safe_dump(entries, default_flow_style=flow)
    for number, (name, finish) in enumerate(steps, start=3):
        before = keys_of(text)
        try:
            text = drop_old_secret(text, name) if finish else add_secret(text, name, f"{number:064x}")
        except RotationError:
            continue
        after = keys_of(text)
        lost = {hash for key in before.values() for hash in key.hashes} - {
            hash for key in after.values() for hash in key.hashes
        }
        assert lost == ({before[name].hashes[0]} if finish else set())
        assert after[name].hashes[-1] == (before[name].hashes[-1] if finish else f"{number:064x}")
        assert text.startswith("# keys\n")
