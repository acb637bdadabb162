"""The errors of commands that start or call a service."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from serve_app.client import ServiceError
from serve_app.system.command_line import USAGE


class LaunchError(click.ClickException):
    """The service can't start; the message tells its user the reason."""


class ConfigError(LaunchError):
    """The config or the model is wrong: the same command would fail again."""

    exit_code = USAGE


class SlowStartError(LaunchError):
    """Ray or Ray Serve was too slow for one of its own limits; another try may be faster."""


@contextmanager
def service_errors() -> Iterator[None]:
    """Turn the errors of a client into those of a command."""
    try:
        yield
    except ServiceError as error:
        raise click.ClickException(error.message) from None
