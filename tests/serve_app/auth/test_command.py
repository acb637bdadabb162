"""The command `saturate keys`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from serve_app.auth.command import keys
from serve_app.auth.keys import hash_key, new_key, read_keys
from serve_app.settings.usage import Quota
from tests import progress

ENTRIES = f"""\
- name: ada            # on the third floor
  sha256: {"a" * 64}
  tenant: research
  models: [demo, minilm]
  quota:
    requests_per_minute: 60
- name: bob
  sha256: {"b" * 64}
  tenant: batch
  expires: 2020-01-31
  allow_from: [10.0.0.0/8]
  admin: true
- {{name: eve, sha256: {"d" * 64}, tenant: x, disabled: true}}
"""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "keys.yaml"
    path.write_text(ENTRIES)
    return path


def invoke(*arguments: str | Path) -> Result:
    return CliRunner().invoke(keys, [str(argument) for argument in arguments])


def secret_of(result: Result) -> str:
    (secret,) = (word for word in result.stderr.split() if word.startswith("sk-"))
    assert "sk-" not in result.stdout
    return secret


# New keys


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "serve_app.auth.command", *arguments]
    return progress.run(command)


def test_the_command_shows_a_key_once_and_prints_only_its_hash() -> None:
    done = run("new", "--name", "ada", "--tenant", "research", "--tiers", "flex", "--max-concurrency", "5")
    assert done.returncode == 0, done.stderr
    (key,) = read_keys(done.stdout, "stdout")
    # Standard output goes to a file, and the file into a Secret.
    assert "sk-" not in done.stdout
    (secret,) = (word for word in done.stderr.split() if word.startswith("sk-"))
    assert key.sha256 == hash_key(secret.encode())
    assert (key.name, key.tenant, key.tiers) == ("ada", "research", ("flex",))
    assert key.quota == Quota(max_concurrency=5)


@pytest.mark.parametrize(
    "tiers",
    [["--tiers", "flex,default"], ["--tiers", "flex", "--tiers", "default"], ["--tiers", "flex", "default"]],
    ids=" ".join,
)
def test_several_tiers(tiers: list[str]) -> None:
    done = invoke("new", "--name", "ada", "--tenant", "research", *tiers)
    (key,) = read_keys(done.stdout, "stdout")
    assert key.tiers == ("flex", "default")


def test_a_missing_option_is_an_error_of_usage() -> None:
    done = run("new", "--name", "ada")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: missing option '--tenant' (see `")
    assert done.stderr.count("\n") == 1


def test_a_key_has_its_models_addresses_expiry_and_role() -> None:
    options = [
        "--models",
        "a,b",
        "--models",
        "c",
        "--allow-from",
        "10.0.0.0/8,::1",
        "--expires",
        "2099-01-31",
    ]
    done = invoke("new", "--name", "ada", "--tenant", "research", *options, "--admin")
    (key,) = read_keys(done.stdout, "stdout")
    assert key.models == ("a", "b", "c")
    assert [str(range) for range in key.allow_from or ()] == ["10.0.0.0/8", "::1/128"]
    assert key.expires is not None
    assert key.expires.isoformat() == "2099-01-31T00:00:00+00:00"
    assert key.admin
    assert hash_key(secret_of(done).encode()) == key.sha256


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("--expires", "2099-01-31T10:00:00", "[0].expires: has no time zone"),
        ("--allow-from", "10.0.0.1/8", "the range is written 10.0.0.0/8"),
        ("--models", "a b", "[0].models[0]: "),
        ("--max-concurrency", "0", "[0].quota.max_concurrency: Input should be greater than or equal to 1"),
        ("--name", "a b", "[0].name: "),
    ],
)
def test_a_wrong_field_makes_no_key(option: str, value: str, words: str) -> None:
    done = invoke("new", "--name", "ada", "--tenant", "research", option, value)
    assert done.exit_code == 2
    assert words in done.stderr
    assert "sk-" not in done.output


# Lists and checks


def test_a_list_has_the_state_of_each_key_and_no_hash(file: Path) -> None:
    done = invoke("list", file)
    head, ada, bob, eve = done.stdout.splitlines()
    assert head.split()[:4] == ["name", "tenant", "state", "expires"]
    assert ada.split()[:4] == ["ada", "research", "valid", "never"]
    assert "demo, minilm" in ada
    assert "requests_per_minute 60" in ada
    assert bob.split()[:4] == ["bob", "batch", "expired", "2020-01-31"]
    assert "10.0.0.0/8" in bob
    assert bob.endswith("admin")
    assert eve.split()[:3] == ["eve", "x", "disabled"]
    assert "a" * 64 not in done.stdout


def test_a_list_as_json_is_that_of_the_route(file: Path) -> None:
    shown = json.loads(invoke("list", "--json", file).stdout)
    assert [(key["name"], key["state"]) for key in shown] == [
        ("ada", "valid"),
        ("bob", "expired"),
        ("eve", "disabled"),
    ]


def test_a_right_file_passes_with_warnings(file: Path) -> None:
    key = new_key()
    file.write_text(f"{ENTRIES}- name: late  # {key}\n  sha256: {hash_key(key.encode())}\n  tenant: x\n")
    done = invoke("check", file)
    assert (done.exit_code, done.stdout) == (0, f"{file}: 4 keys\n")
    assert done.stderr.splitlines() == [
        f"warning: {file}: [1].expires: the key bob is invalid since 2020-01-31 00:00 UTC",
        f"warning: {file}: has the key of late in plain text; the hash is enough",
    ]


@pytest.mark.parametrize("command", [["check"], ["list"]], ids=" ".join)
@pytest.mark.parametrize(
    ("content", "words"),
    [
        (ENTRIES.replace("tenant: x", "tenants: x"), "[2].tenants: unknown key; did you mean tenant?"),
        (ENTRIES.replace("10.0.0.0/8", "10.0.0.0/80"), "[1].allow_from[0]: must be an address"),
        (
            ENTRIES.replace("d" * 64, "b" * 64),
            "[1].sha256 and [2].sha256: one hash twice: bob, eve",
        ),
        (b"\xff", "it is not UTF-8"),
        (None, "No such file or directory"),
    ],
    ids=["field", "range", "hash", "text", "missing"],
)
def test_a_wrong_file_is_one_line_with_the_path(
    file: Path, command: list[str], content: str | bytes | None, words: str
) -> None:
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    done = invoke(*command, file)
    # A check that finds a mistake has done its work.
    found = command == ["check"] and isinstance(content, str)
    assert (done.exit_code, done.stdout) == (1 if found else 2, "")
    assert words in done.stderr
    assert str(file) in done.stderr
    assert "sk-" not in done.output


# A second secret


def test_a_second_secret_is_made_like_a_key(file: Path) -> None:
    done = invoke("new", "--name", "bob", "--tenant", "batch", "--allow-from", "10.0.0.0/8", "--admin")
    file.write_text(ENTRIES + done.stdout)
    assert invoke("check", file).stdout == f"{file}: 3 keys\n"
    found = [key for key in read_keys(file.read_text(), "keys") if key.name == "bob"]
    assert [key.sha256 for key in found] == ["b" * 64, hash_key(secret_of(done).encode())]


def test_a_key_that_can_not_be_shown_is_not_made() -> None:
    command = [sys.executable, "-m", "serve_app.auth.command", "new", "--name", "sam", "--tenant", "x"]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
