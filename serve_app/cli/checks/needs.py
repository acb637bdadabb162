"""The needs of a config, read without Ray."""

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.settings.completion import complete_config
from serve_app.settings.config_file import (
    ConfigFileError,
    environment_of,
    items,
    mapping,
    own_applications,
    read_file,
)
from serve_app.settings.environment import CONTROLLER, HAPROXY
from serve_app.settings.models import LLMSettings, ModelSettings
from serve_app.settings.schema import SettingsError, parse


@dataclass(frozen=True, slots=True)
class Deployment:
    """The needs of a deployment at its start.

    Attributes:
        name: Name of the deployment.
        replicas: Replicas; at least one, since a deployment that is scaled to zero must start later.
        cores: Cores that each replica reserves.
        gpus: GPUs that each replica reserves.
    """

    name: str
    replicas: int
    cores: float
    gpus: float


@dataclass(frozen=True, slots=True)
class Needs:
    """The needs of a config; the defaults describe a typical service.

    Attributes:
        path: The config; None: no config.
        host: Address that the service listens on.
        port: Port that the service listens on.
        haproxy: Whether HTTP goes through HAProxy.
        limited: Whether HAProxy has the limits of this project.
        variables: Environment variables that the config sets for the controller and the replicas.
        models: Models of the config.
        deployments: Deployments of the config.
        keys_files: Files of API keys.
    """

    path: Path | None = None
    host: str = "127.0.0.1"
    port: int = 8000
    haproxy: bool = True
    limited: bool = True
    variables: Mapping[str, str] = field(default_factory=dict)
    models: tuple[ModelSettings, ...] = ()
    deployments: tuple[Deployment, ...] = ()
    keys_files: tuple[Path, ...] = ()

    @property
    def llms(self) -> list[LLMSettings]:
        """The language models."""
        return [model for model in self.models if isinstance(model, LLMSettings)]

    def gpus_of(self, model: str) -> float:
        """Return the GPUs that a replica of a model reserves."""
        return next((one.gpus for one in self.deployments if one.name == f"Engine:{model}"), 0.0)

    def variable(self, name: str, environment: Mapping[str, str] = os.environ) -> str:
        """Return an environment variable of the replicas; empty if it isn't set."""
        return self.variables.get(name) or environment.get(name, "")


def read_needs(path: Path) -> Needs:
    """Read the needs of a config; skip invalid parts, which `check_config` reports."""
    try:
        config = complete_config(read_file(path))
    except ConfigFileError:
        return Needs(path)
    http = mapping(config.get("http_options"))
    controller = _variables(config.get("controller_options"))
    models: list[ModelSettings] = []
    keys_files: list[Path] = []
    deployments: list[Deployment] = []
    variables = dict(controller)
    for app in own_applications(config).values():
        variables |= _variables(app)
        try:
            settings = parse(mapping(app.get("args")))
        except SettingsError:
            settings = None
        own = settings.models if settings else []
        if settings and settings.access and settings.access.keys_file:
            keys_files.append(Path(settings.access.keys_file))
        models += own
        deployments += _deployments(app, own)
    port = http.get("port")
    return Needs(
        path,
        str(http.get("host") or "127.0.0.1"),
        port if isinstance(port, int) else 8000,
        controller.get(HAPROXY.name, HAPROXY.value) == "1",
        controller.get(CONTROLLER.name) == CONTROLLER.value,
        variables,
        tuple(models),
        tuple(deployments),
        tuple(keys_files),
    )


def _deployments(app: JSON, models: list[ModelSettings]) -> Iterator[Deployment]:
    given = {str(one.get("name")): one for one in _mappings(app.get("deployments"))}
    for name in ("Ingress", *(f"Engine:{model.id}" for model in models)):
        one = given.get(name, {})
        options = mapping(one.get("ray_actor_options"))
        scaling = mapping(one.get("autoscaling_config"))
        replicas = one.get("num_replicas")
        if not isinstance(replicas, int):
            replicas = scaling.get("initial_replicas") or scaling.get("min_replicas") or 1
        yield Deployment(
            name,
            replicas if isinstance(replicas, int) else 1,
            # Ray Serve reserves a core for a replica by default.
            _number(options.get("num_cpus"), 1.0),
            _number(options.get("num_gpus"), 0.0),
        )


def _variables(part: Any) -> dict[str, str]:
    """Return the environment variables of a part of the config."""
    return {str(name): str(value) for name, value in environment_of(part).items()}


def _mappings(value: Any) -> list[JSON]:
    return [one for one in items(value) if isinstance(one, dict)]


def _number(value: Any, default: float) -> float:
    return float(value) if isinstance(value, int | float) else default
