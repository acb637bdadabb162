"""A command is imported when it is used, so that the help of `saturate` is fast."""

import sys
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from serve_app.cli.lazy import LazyGroup

MODULE = """
import click

@click.command()
@click.argument("name")
@click.option("--loud", is_flag=True, help="In capitals.")
def greet(name, loud):
    '''Greets someone.'''
    click.echo(name.upper() if loud else name)
"""


@pytest.fixture
def group(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> click.Group:
    """A group of two commands; the module of one of them doesn't exist."""
    (tmp_path / "lazy_commands.py").write_text(MODULE)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "lazy_commands", raising=False)
    return LazyGroup(
        name="tool",
        places={
            "greet": ("lazy_commands:greet", "Greets."),
            "broken": ("module_that_is_not_there:main", "Fails."),
        },
    )


def test_the_help_of_the_group_imports_nothing(group: click.Group) -> None:
    result = CliRunner().invoke(group, ["--help"])
    assert result.exit_code == 0
    # In the order that is stated, not by name.
    assert result.output.index("Greets.") < result.output.index("Fails.")
    assert "lazy_commands" not in sys.modules


def test_a_command_has_its_own_options_and_help(group: click.Group) -> None:
    assert CliRunner().invoke(group, ["greet", "--loud", "ada"]).output == "ADA\n"
    assert "In capitals." in CliRunner().invoke(group, ["greet", "--help"]).output
    wrong = CliRunner().invoke(group, ["greet"])
    assert wrong.exit_code == 2
    assert "Missing argument 'NAME'" in wrong.output


def test_a_command_that_is_not_there_is_named(group: click.Group) -> None:
    result = CliRunner().invoke(group, ["great"])
    assert result.exit_code == 2
    assert "No such command 'great'" in result.output
