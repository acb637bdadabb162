"""Put the settings chosen by `saturate tune` into a running service, or into a config."""

import asyncio
import copy
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click

from serve_app.api.protocol import JSON
from serve_app.cli.dashboard import Dashboard
from serve_app.settings.config_file import ConfigFileError, models_of, read_file
from serve_app.system.disk import replace_text
from serve_app.system.yaml_text import updated_or_new
from serve_app.tuning.tuner import TunedSettings

LOCAL = {"127.0.0.1", "localhost", "::1", "0.0.0.0"}

LOOKS, LOOK_S = 120, 0.5
"""Maximum polls of a service until all replicas have a change, and the seconds between polls."""


class ChangeError(ValueError):
    """A config has no such model, or has another form there."""


def changed(config: JSON, model: str, settings: TunedSettings) -> JSON:
    """Return a Serve config with the settings in the `user_config` of a model, which restarts nothing.

    The target of the autoscaling goes where the deployment scales by `target_ongoing_requests`.

    Args:
        config: The config, as `saturate serve` reads it.
        model: The id of the model.
        settings: The settings.

    Raises:
        ChangeError: No application has the model, or a field has another form; the message names it.
    """
    config = copy.deepcopy(config)
    for app in config["applications"]:
        if any(each.get("id", each.get("source")) == model for each in models_of(app)):
            break
    else:
        raise ChangeError(f"the config has no model {model!r}")
    name = f"Engine:{model}"
    deployments = _part(app, "deployments", list)
    found = [each for each in deployments if isinstance(each, dict) and each.get("name") == name]
    if not found:
        found = [{"name": name}]
        deployments += found
    deployment = found[0]
    _part(_part(deployment, "user_config", dict), "batcher", dict).update(settings.batcher)
    scaling = deployment.get("autoscaling_config")
    if isinstance(scaling, dict) and "policy" not in scaling:
        scaling["target_ongoing_requests"] = settings.target_ongoing_requests
    return config


def _part(section: JSON, name: str, form: type) -> Any:
    """Return a part of a section, which is added if it is missing or has no value."""
    if section.get(name) is None:
        section[name] = form()
    if not isinstance(section[name], form):
        kind = "list" if form is list else "mapping"
        raise ChangeError(f"{name} must be a {kind}, not {section[name]!r:.60}")
    return section[name]


class RunningConfig:
    """The config of a service on this machine.

    Args:
        url: The base URL of the service.
        dashboard: The dashboard of its Ray; None: search for it.
        look_s: Seconds between two looks at a change.

    Raises:
        click.UsageError: The service runs on another machine, or its dashboard can't be found.
    """

    def __init__(self, url: str, dashboard: Dashboard | None = None, *, look_s: float = LOOK_S) -> None:
        parts = urlsplit(url)
        if parts.hostname not in LOCAL:
            raise click.UsageError(
                f"--apply: {parts.hostname} isn't this machine; run the command there, or change the config "
                "with --write and deploy it"
            )
        self._look_s = look_s
        self._dashboard = dashboard or Dashboard(parts.port or 80)
        self._config: JSON = self._dashboard.config()
        if not self._config:
            raise click.UsageError(
                "--apply: the dashboard of the service's Ray isn't on this machine, or the service was not "
                "started with a config; change the config with --write, and deploy it"
            )

    async def apply(self, model: str, settings: TunedSettings) -> None:
        """Deploy the settings without a restart, and wait until all replicas have them.

        Raises:
            click.ClickException: Ray Serve refuses the settings, or they don't reach all replicas in time.
        """
        try:
            config = changed(self._config, model, settings)
        except ChangeError as error:
            raise click.ClickException(f"--apply: {error}") from None
        if refusal := await asyncio.to_thread(self._dashboard.deploy, config):
            raise click.ClickException(f"--apply: Ray Serve refuses the settings: {refusal}")
        for _ in range(LOOKS):
            await asyncio.sleep(self._look_s)
            if not await asyncio.to_thread(self._is_updating, f"Engine:{model}"):
                return
        raise click.ClickException(
            f"--apply: not all replicas have the settings after {LOOKS * LOOK_S:.0f} s; see the log of Serve"
        )

    def _is_updating(self, name: str) -> bool:
        """Return whether Ray Serve is still updating the application of a deployment, or its replicas."""
        apps = self._dashboard.applications().values()
        owners = [app for app in apps if name in (app.get("deployments") or {})]
        states = [(app.get("status"), app["deployments"][name].get("status")) for app in owners]
        return any("DEPLOYING" in state or "UPDATING" in state for state in states)


def read_config(path: Path) -> JSON:
    """Return a Serve config.

    Raises:
        click.UsageError: The file can't be read, or is not a Serve config; the message names the field.
    """
    try:
        config = read_file(path)
    except ConfigFileError as error:
        raise click.UsageError(f"--write {error}") from None
    if not any(True for app in config["applications"] for _ in models_of(app)):
        raise click.UsageError(f"--write {path}: no application has a list args.models with a model")
    return config


def write_config(path: Path, model: str, settings: TunedSettings) -> None:
    """Put the settings into a config; its comments stay.

    Raises:
        click.ClickException: The config has no such model, or can't be written; it stays as it is.
    """
    try:
        config = changed(read_config(path), model, settings)
        replace_text(path, updated_or_new(path.read_text(), config))
    except ChangeError as error:
        raise click.ClickException(f"--write {path}: {error}") from None
    except OSError as error:
        raise click.ClickException(f"--write {path}: {error.strerror}") from None
