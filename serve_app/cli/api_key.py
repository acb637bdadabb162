"""The API key for commands that call a service."""

import os

import click


def read_api_key(name: str | None) -> str | None:
    """Return the API key in an environment variable.

    Args:
        name: The variable, from `--api-key-env`; None: no key.

    Raises:
        click.UsageError: The variable is missing or empty.
    """
    if name is None:
        return None
    if not (key := os.environ.get(name)):
        raise click.UsageError(f"--api-key-env {name}: no such variable in the environment")
    return key
