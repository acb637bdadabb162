"""The command `saturate` and its subcommands."""

import sys

import click
import pytest
from click.shell_completion import ShellComplete
from click.testing import CliRunner

from serve_app.cli.main import saturate
from tests.progress import run

SCRIPT = """
import runpy
import sys
try:
    runpy.run_module("serve_app.cli", run_name="__main__", alter_sys=True)
except SystemExit as end:
    assert not end.code, end.code
print([name for name in ("ray", "vllm", "torch", *OTHERS) if name in sys.modules])
"""
MODULES = {
    "serve": "serve_app.cli.serve",
    "plan": "serve_app.cli.plan",
    "batch": "serve_app.dataset.command",
    "keys": "serve_app.auth.command",
}
"""The modules of some commands; another command imports none of them."""


@pytest.mark.parametrize(
    "arguments",
    [
        ["--help"],
        ["--version"],
        ["serve", "--help"],
        ["stop", "--help"],
        ["batch", "--help"],
        ["top", "--help"],
        ["doctor", "--help"],
        ["plan", "--help"],
        ["profile", "--help"],
        ["keys", "new", "--name", "ada", "--tenant", "research"],
    ],
    ids=" ".join,
)
def test_neither_ray_nor_another_command_is_loaded_for(arguments: list[str]) -> None:
    others = [module for name, module in MODULES.items() if name != arguments[0]]
    done = run([sys.executable, "-c", f"OTHERS = {others}{SCRIPT}", *arguments])
    # A new key is shown there.
    assert "Traceback" not in done.stderr
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "[]"


def test_the_version_is_that_of_the_package() -> None:
    assert CliRunner().invoke(saturate, ["--version"]).stdout.startswith("saturate 0.")


def test_help_lists_every_command_with_its_line() -> None:
    text = CliRunner().invoke(saturate, ["--help"]).stdout
    for name, command in saturate.commands.items():
        assert command.short_help
        assert f"  {name}  " in text
        assert command.short_help in text


@pytest.mark.parametrize("name", saturate.commands)
def test_every_command_explains_itself(name: str) -> None:
    result = CliRunner().invoke(saturate, [name, "--help"])
    assert result.exit_code == 0
    assert result.stdout.startswith(f"Usage: saturate {name} ")


def completions(*arguments: str) -> list[str]:
    *before, incomplete = arguments
    shell = ShellComplete(saturate, {}, "saturate", "_SATURATE_COMPLETE")
    return [item.value for item in shell.get_completions(before, incomplete)]


def test_shells_complete_commands_and_options() -> None:
    # In the order that is stated, not by name.
    assert completions("")[:4] == ["serve", "batch", "keys", "usage"]
    assert completions("s") == ["serve", "schema", "stop"]
    assert completions("batch", "--max-") == ["--max-tokens", "--max-concurrency"]
    assert completions("keys", "") == ["check", "list", "new"]


def test_an_unknown_command_is_an_error_of_usage() -> None:
    with pytest.raises(click.UsageError, match="No such command 'tuna'"):
        saturate.main(["tuna"], standalone_mode=False)
