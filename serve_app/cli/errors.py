"""Errors of commands that start or call a service."""

from collections.abc import Iterator
from contextlib import contextmanager

import click

from serve_app.client import ServiceError
from serve_app.system.command_line import USAGE


class LaunchError(click.ClickException):
    """The service can't start; the message has the reason."""


class ConfigError(LaunchError):
    """The config or the model is wrong; a retry would fail again."""

    exit_code = USAGE


@contextmanager
def service_errors() -> Iterator[None]:
    """Convert errors of a client to errors of a command."""
    try:
        yield
    except ServiceError as error:
        raise click.ClickException(error.message) from None
