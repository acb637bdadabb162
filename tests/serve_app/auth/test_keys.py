"""API keys: their making, their list, and errors that don't show a key."""

import hashlib
import json
import subprocess
import sys
from typing import Any

import pytest
import yaml

from serve_app.auth.keys import hash_key, new_key, plain_keys, read_keys
from serve_app.settings.schema import SettingsError

HASH = "a" * 64
ADA = {"name": "ada", "sha256": HASH, "tenant": "research"}
SECRET = "sk-do-not-print-me"


def error_of(content: Any) -> str:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(SettingsError) as caught:
        read_keys(text, "keys.yaml")
    assert str(caught.value).startswith("keys.yaml: ")
    assert SECRET not in str(caught.value)
    return str(caught.value)


def test_a_key_is_random_and_long() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100
    # 256 bits take 43 characters of base64.
    assert {len(key) for key in keys} == {46}


def test_its_hash_is_sha256() -> None:
    assert hash_key(b"x") == hashlib.sha256(b"x").hexdigest()


def test_yaml_and_json_are_read_alike_and_limits_default_to_none() -> None:
    (key,) = read_keys(json.dumps([ADA]), "x")
    assert read_keys(yaml.safe_dump([ADA]), "x") == [key]
    assert (key.tiers, key.any_tenant) == (("priority", "default", "flex"), False)
    assert key.requests_per_minute is key.max_concurrency is None
    assert read_keys("[]", "x") == []


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"name": None}, "[0].name: "),
        ({"name": "a b"}, "[0].name: "),
        ({"sha256": SECRET}, "[0].sha256: must be the SHA-256 of the key: 64 hex digits"),
        ({"sha256": HASH.upper()}, "[0].sha256: must be"),
        ({"tenant": ""}, "[0].tenant: must be 1 to 128 printable characters"),
        ({"weight": 0}, "[0].weight: "),
        ({"tiers": []}, "[0].tiers: "),
        ({"tiers": ["best"]}, "[0].tiers[0]: "),
        ({"requests_per_minute": 0}, "[0].requests_per_minute: "),
        ({"max_concurrency": "5"}, "[0].max_concurrency: "),
        ({"quota": {"tokens": 5}}, "[0].quota.tokens: unknown field; allowed are tokens_per_minute, "),
        ({"quota": {"tokens_per_day": -5}}, "[0].quota.tokens_per_day: "),
        ({"key": SECRET}, "[0].key: unknown field; allowed are name, sha256, tenant"),
    ],
)
def test_an_error_has_its_place_and_not_its_value(change: dict[str, Any], words: str) -> None:
    assert words in error_of([ADA | change])


@pytest.mark.parametrize(
    "text",
    ["", "ada", "{}", f"- sha256: {SECRET}\n  - x", f"[{SECRET}", f'["{SECRET}"]', f"- &a {SECRET}\x01"],
)
def test_anything_but_a_list_of_keys_is_refused_without_being_quoted(text: str) -> None:
    error_of(text)


@pytest.mark.parametrize("field", ["name", "sha256"])
def test_two_keys_differ_in_name_and_hash(field: str) -> None:
    other = {"name": "bob", "sha256": "b" * 64, "tenant": "research"}
    assert f"two keys with the same {field}" in error_of([ADA, other | {field: ADA[field]}])


def test_the_keys_of_one_tenant_have_one_weight() -> None:
    bob = {"name": "bob", "sha256": "b" * 64, "tenant": "research"}
    assert "the tenant 'research' differ in weight" in error_of([ADA | {"weight": 1}, bob | {"weight": 2}])
    assert [key.weight for key in read_keys(json.dumps([ADA, bob | {"weight": 2}]), "x")] == [None, 2]


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "serve_app.auth.keys", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


def test_the_command_shows_a_key_once_and_prints_only_its_hash() -> None:
    done = run("new", "--name", "ada", "--tenant", "research", "--tiers", "flex", "--max-concurrency", "5")
    assert done.returncode == 0, done.stderr
    (key,) = read_keys(done.stdout, "stdout")
    # Standard output goes to a file, and the file into a Secret.
    assert "sk-" not in done.stdout
    (secret,) = (word for word in done.stderr.split() if word.startswith("sk-"))
    assert key.sha256 == hash_key(secret.encode())
    assert (key.name, key.tenant, key.tiers, key.max_concurrency) == ("ada", "research", ("flex",), 5)


def test_a_key_in_a_comment_is_found_and_another_text_is_not() -> None:
    key = new_key()
    text = json.dumps([ADA | {"sha256": hash_key(key.encode())}, ADA | {"name": "bob"}])
    keys = read_keys(text, "keys.yaml")
    assert plain_keys(f"# {key}\n{text}", keys) == ["ada"]
    assert plain_keys(f"# {new_key()}\n{text}", keys) == []


def test_the_command_refuses_a_key_that_the_service_would_refuse() -> None:
    done = run("new", "--name", "a b", "--tenant", "research")
    assert done.returncode == 1
    assert "name" in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    "tiers",
    [["--tiers", "flex,default"], ["--tiers", "flex", "--tiers", "default"], ["--tiers", "flex", "default"]],
    ids=" ".join,
)
def test_several_tiers(tiers: list[str]) -> None:
    done = run("new", "--name", "ada", "--tenant", "research", *tiers)
    (key,) = read_keys(done.stdout, "stdout")
    assert key.tiers == ("flex", "default")


def test_a_limit_of_nothing_is_refused() -> None:
    done = run("new", "--name", "ada", "--tenant", "research", "--max-concurrency", "0")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == "error: the key: [0].max_concurrency: Input should be greater than or equal to 1\n"


def test_a_missing_option_is_an_error_of_usage() -> None:
    done = run("new", "--name", "ada")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: missing option '--tenant' (see `")
    assert done.stderr.count("\n") == 1


def test_the_old_path_of_the_module_is_a_command() -> None:
    command = [sys.executable, "-m", "serve_app.keys", "new", "--name", "ada", "--tenant", "research"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert len(read_keys(done.stdout, "stdout")) == 1
