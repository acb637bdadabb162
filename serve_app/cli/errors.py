"""The errors of a service that can't start."""

import click


class LaunchError(click.ClickException):
    """The service can't start; the message tells its user the reason."""


class SlowStartError(LaunchError):
    """Ray or Ray Serve was too slow for one of its own limits; another try may be faster."""
