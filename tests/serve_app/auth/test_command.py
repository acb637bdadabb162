"""The command `saturate keys`."""

import hashlib
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result

from serve_app.cli.main import saturate
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
    return CliRunner().invoke(saturate, ["keys", *map(str, arguments)])


def entry_of(stdout: str, stderr: str) -> dict[str, Any]:
    """Return the entry of a new key, whose secret is shown on standard error alone."""
    (secret,) = (word for word in stderr.split() if word.startswith("sk-"))
    assert "sk-" not in stdout
    (entry,) = yaml.safe_load(stdout)
    assert entry.pop("sha256") == hashlib.sha256(secret.encode()).hexdigest()
    return dict(entry)


# New keys


def run(*arguments: str) -> "subprocess.CompletedProcess[str]":
    command = [sys.executable, "-m", "serve_app.auth.command", *arguments]
    return progress.run(command)


def test_the_command_shows_a_key_once_and_prints_only_its_hash() -> None:
    done = run("new", "--name", "ada", "--tenant", "research", "--tiers", "flex", "--max-concurrency", "5")
    assert done.returncode == 0, done.stderr
    # Standard output goes to a file, and the file into a Secret.
    assert entry_of(done.stdout, done.stderr) == {
        "name": "ada",
        "tenant": "research",
        "tiers": ["flex"],
        "quota": {"max_concurrency": 5},
    }


def test_a_key_is_random_and_long() -> None:
    made = [invoke("new", "--name", "ada", "--tenant", "research").stderr.split()[-1] for _ in range(20)]
    assert len(set(made)) == 20
    # 256 bits take 43 characters of base64.
    assert {len(key) for key in made} == {46}


@pytest.mark.parametrize(
    "tiers",
    [["--tiers", "flex,default"], ["--tiers", "flex", "--tiers", "default"], ["--tiers", "flex", "default"]],
    ids=" ".join,
)
def test_several_tiers(tiers: list[str]) -> None:
    done = invoke("new", "--name", "ada", "--tenant", "research", *tiers)
    assert entry_of(done.stdout, done.stderr)["tiers"] == ["flex", "default"]


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
    entry = entry_of(done.stdout, done.stderr)
    assert (entry["models"], entry["allow_from"]) == (["a", "b", "c"], ["10.0.0.0/8", "::1"])
    assert (str(entry["expires"]), entry["admin"]) == ("2099-01-31", True)


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


@pytest.mark.parametrize("old", [True, False])
def test_a_right_file_passes_with_warnings(old: bool, file: Path) -> None:
    valid = ["--name", "late", "--tenant", "x", "--expires", "2099-01-31"]
    made = [invoke("new", *valid) for _ in range(2)]
    entries, secrets = [done.stdout for done in made], [done.stderr.split()[-1] for done in made]
    # A key has two secrets, and one of them is in the file. Another text is like a key.
    notes = f"# {secrets[not old]}\n# sk-{'x' * 43}\n"
    file.write_text(ENTRIES + "".join(entries) + notes)
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
    assert entry_of(done.stdout, done.stderr)["name"] == "bob"
    states = [(key["name"], key["state"]) for key in json.loads(invoke("list", "--json", file).stdout)]
    assert [state for name, state in states if name == "bob"] == ["expired", "valid"]


def test_a_key_that_can_not_be_shown_is_not_made() -> None:
    command = [sys.executable, "-m", "serve_app.auth.command", "new", "--name", "sam", "--tenant", "x"]
    shell = ["sh", "-c", 'exec "$@" 2>&-', "sh", *command]
    done = subprocess.run(shell, stdout=subprocess.PIPE, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (1, "")
