"""The command `saturate doctor`."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from serve_app.cli import doctor as command
from serve_app.cli.checks.finding import Check, CheckInput, Finding, ok, problem, warning
from serve_app.cli.doctor import CHECKS, examine
from serve_app.cli.machine import MachineFacts
from serve_app.cli.main import saturate
from tests.serve_app.cli.checks.machines import case
from tests.serve_app.cli.services import config, write


def fail(case: CheckInput) -> Finding | None:
    raise RuntimeError("first line\nsecond line")


def run(monkeypatch: pytest.MonkeyPatch, checks: dict[str, Check], *arguments: str) -> Result:
    monkeypatch.setattr(command, "CHECKS", checks)
    # Outside of it, `run` of the command line takes the exit code that a command returns.
    return CliRunner().invoke(saturate, ["doctor", *arguments], standalone_mode=False)


def test_findings_are_lines_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: dict[str, Check] = {
        "first": lambda case: ok("fine"),
        "second": lambda case: warning("slow", "do this"),
        "third": lambda case: problem("broken\nin a place", "do that"),
        "fourth": lambda case: None,
    }
    result = run(monkeypatch, checks)
    assert result.return_value == 1
    assert result.stdout.splitlines() == [
        "ok       first          fine",
        "warning  second         slow",
        "                        -> do this",
        "problem  third          broken",
        "                        in a place",
        "                        -> do that",
        "1 problem, 1 warning",
    ]


def test_warnings_alone_are_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, {"second": lambda case: warning("slow", "do this")})
    assert (result.return_value, result.stdout.splitlines()[-1]) == (0, "0 problems, 1 warning")


def test_a_check_that_fails_is_a_warning_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    result = run(monkeypatch, {"first": fail, "second": lambda case: ok("fine")})
    assert result.return_value == 0
    assert "warning  first          the check could not run: RuntimeError: first line\n" in result.stdout
    assert "ok       second         fine" in result.stdout
    assert "Traceback" not in result.output


def test_json(monkeypatch: pytest.MonkeyPatch) -> None:
    checks: dict[str, Check] = {"a": lambda case: problem("broken", "do"), "b": lambda case: ok("fine")}
    result = run(monkeypatch, checks, "--json")
    assert result.return_value == 1
    assert json.loads(result.stdout) == {
        "ok": False,
        "findings": [
            {"check": "a", "level": "problem", "text": "broken", "fix": "do"},
            {"check": "b", "level": "ok", "text": "fine", "fix": ""},
        ],
    }


@pytest.mark.parametrize(
    ("arguments", "variable", "address"),
    [
        ([], None, None),
        ([], "head:6379", "head:6379"),
        (["--address", "other:6379"], "head:6379", "other:6379"),
        ([], "local", None),
    ],
)
def test_the_case(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    arguments: list[str],
    variable: str | None,
    address: str | None,
) -> None:
    cases: list[CheckInput] = []

    def look(case: CheckInput) -> Finding | None:
        cases.append(case)
        return None

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    if variable:
        monkeypatch.setenv("RAY_ADDRESS", variable)
    result = run(monkeypatch, {"look": look}, str(write(tmp_path, config(1234))), *arguments)
    assert result.return_value == 0
    assert [(one.address, one.needs.port) for one in cases] == [(address, 1234)]


@pytest.mark.parametrize("name", set(CHECKS) - {"sources", "cluster"})
def test_every_check_runs_on_this_machine(name: str) -> None:
    for _, finding in examine(case(machine=MachineFacts()), {name: CHECKS[name]}):
        assert "could not run" not in finding.text
        assert bool(finding.fix) == (finding.level != "ok")
