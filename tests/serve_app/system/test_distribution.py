"""The name of this package, and the commands that messages tell to install it."""

import tomllib
from pathlib import Path

from serve_app.system import distribution
from tests.pages import ROOT


def test_the_name_is_the_name_of_the_project_file() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert (distribution.NAME, distribution.version()) == (project["name"], project["version"])


def test_commands_are_right_in_a_checkout_and_from_a_wheel(tmp_path: Path) -> None:
    here, wheel = ROOT / "pyproject.toml", tmp_path / "pyproject.toml"
    assert distribution.extra("usage", here) == "the extra usage: pip install -e '.[usage]'"
    assert distribution.extra("usage", wheel) == "the extra usage: pip install 'saturate-serve[usage]'"
    assert distribution.build("gpu", here) == "make install BUILD=gpu, or the image saturate-gpu"
    assert distribution.build("cpu", wheel) == (
        "pip install 'saturate-serve[cpu]' in a new environment, or the image saturate-cpu"
    )
