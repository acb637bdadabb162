"""Puts the settings that `saturate tune` has chosen into a service that runs, or into a config."""

import asyncio
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.client import base_url
from serve_app.settings.config_file import ConfigFileError, read_file
from serve_app.system.yaml_text import updated_or_new
from serve_app.tuning.choice import Choice
from serve_app.tuning.config_change import Change, ChangeError, changed
from serve_app.tuning.generator import Generator

LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}

LOOKS, LOOK_S = 120, 0.5
"""Looks at a service until all replicas have a change, and the seconds between them."""


class RunningConfig:
    """The config of a service on this machine.

    Args:
        url: The URL of the service.
        dashboard: The dashboard of its Ray; None: it is looked for.

    Raises:
        click.UsageError: The URL is wrong, the service runs on another machine, or its dashboard can't be
            found.
    """

    def __init__(self, url: str, dashboard: Dashboard | None = None) -> None:
        try:
            parts = urlsplit(base_url(url))
        except ValueError as error:
            raise click.UsageError(f"--apply: {error}") from None
        if parts.hostname not in LOCAL:
            raise click.UsageError(
                f"--apply: {parts.hostname} isn't this machine; run the command there, or change the config "
                "with --write and deploy it"
            )
        self._dashboard = dashboard or Dashboard(parts.port or 80)
        self._config: JSON = self._dashboard.config()
        if not self._config:
            raise click.UsageError(
                "--apply: the dashboard of the service's Ray isn't on this machine, or the service was not "
                "started with a config; change the config with --write, and deploy it"
            )

    async def apply(self, generator: Generator, model: str, choice: Choice) -> Change:
        """Deploy the settings, and wait until all replicas have them; nothing restarts.

        Raises:
            click.ClickException: They are refused, or don't arrive.
        """
        try:
            change = changed(self._config, model, choice)
        except ChangeError as error:
            raise click.ClickException(f"--apply: {error}") from None
        if refusal := await asyncio.to_thread(self._dashboard.deploy, change.config):
            raise click.ClickException(f"--apply: Ray Serve refuses the settings: {refusal}")
        self._config = change.config
        for _ in range(LOOKS):
            arrived = (await generator.facts()).max_num_seqs == choice.max_running
            # The facts have the least of all replicas, and Ray Serve changes some replicas after the others.
            if arrived and not await asyncio.to_thread(self._is_updating, model):
                return change
            await asyncio.sleep(LOOK_S)
        raise click.ClickException(
            f"--apply: not all replicas have max_running {choice.max_running} after {LOOKS * LOOK_S:.0f} s; "
            "see the log of Serve"
        )

    def _is_updating(self, model: str) -> bool:
        """Return whether Ray Serve still changes replicas of a model."""
        return any(
            app.get("deployments", {}).get(f"Engine:{model}", {}).get("status") == "UPDATING"
            for app in self._dashboard.applications().values()
        )


def read_config(path: Path) -> JSON:
    """Return a Serve config.

    Raises:
        click.UsageError: It can't be read, or is none; the message names the field.
    """
    try:
        content = read_file(path)
    except ConfigFileError as error:
        raise click.UsageError(f"--write {error}") from None
    try:
        _check_form(content["applications"])
    except ValueError as error:
        raise click.UsageError(f"--write {path}: {error}") from None
    return content


def _check_form(applications: Any) -> None:
    """Raise a ValueError that names the first field of another form than a change of settings takes."""
    for place, app in _mappings("applications", applications):
        args = _mapping(f"{place}.args", app.get("args") or {})
        for name, model in _mappings(f"{place}.args.models", args.get("models") or []):
            _mapping(f"{name}.batcher", model.get("batcher") or {})
        for name, deployment in _mappings(f"{place}.deployments", app.get("deployments", [])):
            user = _mapping(f"{name}.user_config", deployment.get("user_config") or {})
            _mapping(f"{name}.user_config.batcher", user.get("batcher") or {})


def _mappings(place: str, value: Any) -> Iterator[tuple[str, JSON]]:
    """Yield the mappings of a list, each with its name."""
    if not isinstance(value, list):
        raise ValueError(f"{place}: must be a list, not {value!r:.60}")
    for number, each in enumerate(value):
        name = f"{place}[{number}]"
        yield name, _mapping(name, each)


def _mapping(place: str, value: Any) -> JSON:
    if not isinstance(value, dict):
        raise ValueError(f"{place}: must be a mapping, not {value!r:.60}")
    return value


def write_config(path: Path, model: str, choice: Choice) -> Change:
    """Put the settings into a config, whose comments stay; the config before is kept beside it.

    Raises:
        click.ClickException: The config has no such model, or can't be written.
    """
    try:
        change = changed(read_config(path), model, choice)
        before = path.with_name(f"{path.name}.before")
        shutil.copyfile(path, before)
        # A config may hold secrets.
        shutil.copymode(path, before)
        path.write_text(updated_or_new(path.read_text(), change.config))
    except ChangeError as error:
        raise click.ClickException(f"--write {path}: {error}") from None
    except OSError as error:
        raise click.ClickException(f"--write {path}: {error.strerror}") from None
    return change
