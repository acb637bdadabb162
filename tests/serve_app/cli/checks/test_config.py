"""The check of the config itself."""

from pathlib import Path

from serve_app.cli.checks.config import check_config
from serve_app.cli.checks.needs import read_needs
from tests.serve_app.cli.checks.machines import case
from tests.serve_app.cli.services import config, write


def test_a_config_that_is_right(tmp_path: Path) -> None:
    path = write(tmp_path, config())
    found = check_config(case(needs=read_needs(path)))
    assert found
    assert (found.level, found.text) == ("ok", str(path))


def test_a_mistake_is_told_with_its_place(tmp_path: Path) -> None:
    found = check_config(case(needs=read_needs(write(tmp_path, config(nonsense=1)))))
    assert found
    assert found.level == "problem"
    assert "args.nonsense: unknown key" in found.text


def test_without_a_config_there_is_nothing_to_check() -> None:
    assert check_config(case()) is None
