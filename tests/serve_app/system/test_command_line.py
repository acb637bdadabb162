"""Errors of a command's user: one line on standard error, and an exit code."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from serve_app.system.command_line import Number, WrongInput, run


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
    if size == 9:
        raise KeyError("busy_time_s")
    if size == 10:
        raise WrongInput("no such paint")
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
        (["paint", "10"], 2, "no such paint"),
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


def test_an_unexpected_error_is_one_line_and_its_stack_is_in_a_file(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert end("paint", "9") == 1
    (log,) = tmp_path.iterdir()
    assert capsys.readouterr().err == f"error: KeyError: 'busy_time_s'; the stack is in {log}\n"
    assert "in paint\n" in log.read_text()


def test_an_interrupt_has_its_exit_code() -> None:
    assert end("paint", "8") == 130


@pytest.mark.parametrize("write", ["click.echo('key')", "print('key')"])
def test_a_full_disk_is_one_line(write: str) -> None:
    script = "import click; from serve_app.system.command_line import run\n"
    script += f"run(click.Command('tool', callback=lambda: {write}))"
    with Path("/dev/full").open("w") as full:
        command = [sys.executable, "-c", script]
        done = subprocess.run(
            command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=60, check=False
        )
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


def test_a_file_that_can_t_be_opened_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    read = click.Command("read", callback=(tmp_path / "gone").read_text)
    with pytest.raises(SystemExit) as ended:
        run(read, [])
    assert ended.value.code == 1
    assert capsys.readouterr().err == f"error: {tmp_path}/gone: No such file or directory\n"


@click.command()
@click.option("--share", type=Number(0, 1))
def share_command(share: float | None) -> None:
    click.echo(repr(share))


@pytest.mark.parametrize(("text", "value"), [("0", "0.0"), ("0.25", "0.25"), ("1e-3", "0.001"), ("1", "1.0")])
def test_a_number_in_its_range_is_taken(text: str, value: str) -> None:
    assert CliRunner().invoke(share_command, ["--share", text]).output == f"{value}\n"


@pytest.mark.parametrize("text", ["-0.1", "1.01", "nan", "inf", "-inf", "", "half", "1,5"])
def test_another_number_is_refused(text: str) -> None:
    wrong = CliRunner().invoke(share_command, ["--share", text])
    assert wrong.exit_code == 2
    assert "Invalid value for '--share'" in wrong.output
