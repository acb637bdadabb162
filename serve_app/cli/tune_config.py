"""Put the settings chosen by `saturate tune` into a running service, or into a config."""

import asyncio
import copy
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.client import base_url
from serve_app.settings.config_file import ConfigFileError, read_file
from serve_app.system.disk import replace_text
from serve_app.system.yaml_text import updated_or_new
from serve_app.tuning.load import Generator
from serve_app.tuning.tuner import TunedSettings

LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}

LOOKS, LOOK_S = 120, 0.5
"""Most polls of a service until all replicas have a change, and the seconds between polls."""


class ChangeError(ValueError):
    """A config has no such model."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed Serve config.

    Attributes:
        config: The config.
        left_out: Settings that were not applied, each with the reason.
    """

    config: JSON
    left_out: tuple[str, ...]


def changed(config: JSON, model: str, choice: TunedSettings) -> Change:
    """Return a Serve config with the chosen settings.

    The settings go into the `user_config` of the model's deployment; such a change restarts nothing.

    Args:
        config: The config, as `saturate serve` reads it.
        model: The id of the model.
        choice: The settings.

    Raises:
        ChangeError: No application has the model.
    """
    config = copy.deepcopy(config)
    found = [
        app
        for app in config.get("applications") or []
        for each in (app.get("args") or {}).get("models") or []
        if each.get("id", each.get("source")) == model
    ]
    if not found:
        raise ChangeError(f"the config has no model {model!r}")
    app = found[0]
    # A key without a value is None in YAML.
    deployments = app["deployments"] = app.get("deployments") or []
    name = f"Engine:{model}"
    deployment = next((each for each in deployments if each.get("name") == name), None)
    if deployment is None:
        deployment = {"name": name}
        deployments.append(deployment)
    user = deployment["user_config"] = dict(deployment.get("user_config") or {})
    user["batcher"] = {**(user.get("batcher") or {}), **choice.batcher}
    left_out = []
    scaling = deployment.get("autoscaling_config")
    if scaling and not isinstance(scaling, str) and "policy" not in scaling:
        scaling["target_ongoing_requests"] = choice.target_ongoing_requests
    else:
        reason = "its policy has another target" if scaling else "the model has a fixed number of replicas"
        left_out.append(f"target_ongoing_requests: {reason}")
    return Change(config, tuple(left_out))


class RunningConfig:
    """The config of a service on this machine.

    Args:
        url: The URL of the service.
        dashboard: The dashboard of its Ray; None: search for it.

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

    async def apply(self, generator: Generator, model: str, choice: TunedSettings) -> Change:
        """Deploy the settings without a restart, and wait until all replicas have them.

        Raises:
            click.ClickException: Ray Serve refuses the settings, or they don't reach all replicas in time.
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
            # The facts have the minimum over the replicas, and Ray Serve changes the replicas in turn.
            if arrived and not await asyncio.to_thread(self._is_updating, model):
                return change
            await asyncio.sleep(LOOK_S)
        raise click.ClickException(
            f"--apply: not all replicas have max_running {choice.max_running} after {LOOKS * LOOK_S:.0f} s; "
            "see the log of Serve"
        )

    def _is_updating(self, model: str) -> bool:
        """Return whether Ray Serve is still updating replicas of a model."""
        return any(
            app.get("deployments", {}).get(f"Engine:{model}", {}).get("status") == "UPDATING"
            for app in self._dashboard.applications().values()
        )


def read_config(path: Path) -> JSON:
    """Return a Serve config.

    Raises:
        click.UsageError: The file can't be read, or is not a Serve config; the message names the field.
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
    """Raise a ValueError that names the first field whose type prevents a change of settings."""
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


def write_config(path: Path, model: str, choice: TunedSettings) -> Change:
    """Put the settings into a config and keep its comments; the previous config is kept as a backup.

    Raises:
        click.ClickException: The config has no such model, or can't be written.
    """
    try:
        change = changed(read_config(path), model, choice)
        before = path.with_name(f"{path.name}.before")
        shutil.copyfile(path, before)
        # A config may contain secrets, so the backup gets the same permissions.
        shutil.copymode(path, before)
        replace_text(path, updated_or_new(path.read_text(), change.config))
    except ChangeError as error:
        raise click.ClickException(f"--write {path}: {error}") from None
    except OSError as error:
        raise click.ClickException(f"--write {path}: {error.strerror}") from None
    return change
