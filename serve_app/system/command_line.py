"""Run a click command; each error is one line, without a stack trace.

serve_app/docs/reference/exit-codes.md describes the exit codes.
"""

import math
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence
from typing import Any, NoReturn

import click

FAILED, USAGE, PARTLY, INTERRUPTED = 1, 2, 3, 130
"""Exit codes other than 0: the work failed, the command is wrong, the work is partly done, Ctrl-C."""


class WrongInput(click.ClickException):
    """A file named on the command line, or its content, is wrong; nothing was done."""

    exit_code = USAGE


HUGE = 1e6
"""A bound from here on, or of its inverse, keeps sums finite, and no help shows it."""


class Number(click.FloatRange):
    """A finite number within a range."""

    name = "number"

    def _describe_range(self) -> str:
        if self.max is None or self.max < HUGE:
            return super()._describe_range()
        return "x>0" if self.min and self.min <= 1 / HUGE else f"x>={self.min}"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return an option's value as a number."""
        number = click.FLOAT.convert(value, param, ctx)
        if self.max is not None and HUGE <= self.max < number < math.inf:
            self.fail(f"{value!r} is more than {self.max:,.0f}.", param, ctx)
        number = float(super().convert(number, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value!r} is not a number in the range {self._describe_range()}.", param, ctx)
        return number


MOST_SHOWN = 300
"""Maximum characters shown of an unexpected error."""


def run(command: click.Command, arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit with the code that it returns.

    Args:
        command: Its callback returns an exit code; None is 0.
        arguments: Its arguments; default: the arguments of this process.
    """
    try:
        code = command.main(arguments, standalone_mode=False)
        sys.stdout.flush()
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        code = USAGE
    except click.UsageError as error:
        help = f" (see `{error.ctx.command_path} --help`)" if error.ctx else ""
        print(f"error: {_message(error)}{help}", file=sys.stderr)
        code = USAGE
    except click.ClickException as error:
        print(f"error: {error.format_message()}", file=sys.stderr)
        code = error.exit_code
    except click.Abort:
        code = INTERRUPTED
    except OSError as error:
        if not isinstance(error, BrokenPipeError):
            name = f"{error.filename}: " if error.filename else ""
            print(f"error: {name}{error.strerror or error}", file=sys.stderr)
        _flush()
        code = FAILED
    except Exception as error:
        # The user of a command reads one line; the stack goes to a file.
        text = " ".join(str(error).split())[:MOST_SHOWN]
        print(f"error: {type(error).__name__}: {text}; the stack is in {_keep_stack()}", file=sys.stderr)
        _flush()
        code = FAILED
    sys.exit(code)


def _keep_stack() -> str:
    """Write the stack of the current exception to a file; return its path."""
    with tempfile.NamedTemporaryFile("w", prefix="saturate-", suffix=".log", delete=False) as file:
        file.write(traceback.format_exc())
        return file.name


def _flush() -> None:
    """Flush standard output; if that fails, drop its content, since Python would flush again at exit."""
    try:
        sys.stdout.flush()
    except OSError:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), sys.stdout.fileno())


def _message(error: click.UsageError) -> str:
    if type(error) is click.BadParameter and error.param:
        option = isinstance(error.param, click.Option)
        name = error.param.opts[0] if option else error.param.human_readable_name
        return f"{name}: {error.message.removesuffix('.')}"
    message = error.format_message().removesuffix(".")
    return message[:1].lower() + message[1:]
