"""The error of a service that can't start."""

import click


class LaunchError(click.ClickException):
    """The service can't start; the message tells its user the reason."""
