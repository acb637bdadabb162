"""`serve run` under its supervisor: the environment that it gets."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from serve_app.cli.serve_run import ServeRun

LIMIT_S = 20.0


Seen = Callable[[bool], dict[str, str]]


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Seen:
    """Return a function that runs a `serve` of the tests and returns the environment that it got."""
    python, serve, log = tmp_path / "python", tmp_path / "serve", tmp_path / "log"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')
    serve.write_text(f"#!{sys.executable}\nimport json, os\nprint(json.dumps(dict(os.environ)))\n")
    for program in (python, serve):
        program.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.delenv("RAY_OVERRIDE_RESOURCES", raising=False)

    def environment(own_ray: bool) -> dict[str, str]:
        with log.open("wb") as output:
            run = ServeRun(
                tmp_path / "config.yaml",
                output,
                own_ray=own_ray,
                resources={"ingress": 5.0},
                environment={"MARK": "x"},
            )
            # Not `end`: it would end the services of other tests, which this process has started too.
            run.process.wait(LIMIT_S)
            assert run.process.stdin
            run.process.stdin.close()
        seen: dict[str, str] = json.loads(log.read_text())
        return seen

    return environment


def test_its_own_ray_offers_the_resources_that_the_config_asks_for(environment: Seen) -> None:
    seen = environment(True)
    assert json.loads(seen["RAY_OVERRIDE_RESOURCES"]) == {"ingress": 5.0}
    assert seen["MARK"] == "x"


def test_a_ray_that_others_use_keeps_its_resources(environment: Seen) -> None:
    assert "RAY_OVERRIDE_RESOURCES" not in environment(False)


def test_the_users_own_resources_stay(environment: Seen, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_OVERRIDE_RESOURCES", '{"ingress": 1, "CPU": 3}')
    assert environment(True)["RAY_OVERRIDE_RESOURCES"] == '{"ingress": 1, "CPU": 3}'
