"""The command `saturate doctor`: its lines, its JSON and its exit code."""

import json
from pathlib import Path

import pytest

from serve_app.cli.checks.finding import Check, CheckInput, Finding, ok, problem, warning
from serve_app.cli.doctor import CHECKS, check_input, examine, report
from serve_app.cli.machine import MachineFacts
from tests.serve_app.cli.checks.machines import FakeMachine, case
from tests.serve_app.cli.services import config, write


def fail(case: CheckInput) -> Finding | None:
    raise RuntimeError("first line\nsecond line")


CASES: dict[str, Check] = {
    "first": lambda case: ok("fine"),
    "second": lambda case: warning("slow", "do this"),
    "third": lambda case: problem("broken\nin a place", "do that"),
    "fourth": lambda case: None,
    "fifth": fail,
}


def test_findings_are_lines_with_a_fix(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(case(), CASES, as_json=False) == 1
    assert capsys.readouterr().out.splitlines() == [
        "ok       first          fine",
        "warning  second         slow",
        "                        -> do this",
        "problem  third          broken",
        "                        in a place",
        "                        -> do that",
        "warning  fifth          the check could not run: RuntimeError: first line",
        "                        -> check this by hand, and report it as an error of saturate",
        "1 problem, 2 warnings",
    ]


def test_warnings_alone_are_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    assert report(case(), {"second": CASES["second"]}, as_json=False) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "0 problems, 1 warning"


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    checks = {name: CASES[name] for name in ("third", "first")}
    assert report(case(), checks, as_json=True) == 1
    assert json.loads(capsys.readouterr().out) == {
        "ok": False,
        "findings": [
            {"check": "third", "level": "problem", "text": "broken\nin a place", "fix": "do that"},
            {"check": "first", "level": "ok", "text": "fine", "fix": ""},
        ],
    }


@pytest.mark.parametrize(
    ("option", "variable", "address"),
    [
        (None, None, None),
        (None, "head:6379", "head:6379"),
        ("other:6379", "head:6379", "other:6379"),
        (None, "local", None),
    ],
)
def test_the_option_goes_before_the_variable(
    tmp_path: Path, option: str | None, variable: str | None, address: str | None
) -> None:
    machine = FakeMachine(environment={"RAY_ADDRESS": variable} if variable else {})
    found = check_input(write(tmp_path, config(1234)), option, machine)
    assert (found.address, found.needs.port, found.machine) == (address, 1234, machine)


@pytest.mark.parametrize("name", sorted(set(CHECKS) - {"sources", "cluster"}))
def test_every_check_runs_on_this_machine(name: str) -> None:
    for _, finding in examine(case(machine=MachineFacts()), {name: CHECKS[name]}):
        assert "could not run" not in finding.text
        assert bool(finding.fix) == (finding.level != "ok")
