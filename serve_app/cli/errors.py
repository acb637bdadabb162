"""The errors of a service that can't start."""

import click

from serve_app.system.command_line import USAGE


class LaunchError(click.ClickException):
    """The service can't start; the message tells its user the reason."""


class ConfigError(LaunchError):
    """The config or the model is wrong: the same command would fail again."""

    exit_code = USAGE


class SlowStartError(LaunchError):
    """Ray or Ray Serve was too slow for one of its own limits; another try may be faster."""
