"""Errors of a command's user: one line on standard error, and an exit code."""

from collections.abc import Sequence

import click
import pytest

from serve_app.system.command_line import run


@click.group()
def tool() -> None:
    """A tool."""


@tool.command()
@click.argument("size", type=click.IntRange(1))
@click.option("--color", type=click.Choice(["red", "blue"]))
def paint(size: int, color: str | None) -> int:
    """Paint."""
    if size == 7:
        raise click.ClickException("7 is not for paint")
    if size == 8:
        raise KeyboardInterrupt
    return size


def end(*arguments: str) -> object:
    with pytest.raises(SystemExit) as ended:
        run(tool, arguments)
    return ended.value.code


def test_the_exit_code_is_the_result_of_the_command() -> None:
    assert end("paint", "5") == 5


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (["paint", "0"], 2, "SIZE: 0 is not in the range x>=1 (see `pytest paint --help`)"),
        (["paint"], 2, "missing argument 'SIZE' (see `pytest paint --help`)"),
        (
            ["paint", "1", "--color", "x"],
            2,
            "--color: 'x' is not one of 'red', 'blue' (see `pytest paint --help`)",
        ),
        (["paint", "7"], 1, "7 is not for paint"),
    ],
)
def test_an_error_is_one_line(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: Sequence[str],
    code: int,
    message: str,
) -> None:
    monkeypatch.setattr("click.core._detect_program_name", lambda: "pytest")
    assert end(*arguments) == code
    assert capsys.readouterr().err == f"error: {message}\n"


def test_without_arguments_the_help_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    assert end() == 2
    assert "Commands:\n  paint  Paint." in capsys.readouterr().err


def test_an_interrupt_has_its_exit_code() -> None:
    assert end("paint", "8") == 130
