"""Read, check and change the Serve config of a service."""

import os
from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import ValidationError
from ray.serve.schema import RayActorOptionsSchema, ServeApplicationSchema, ServeDeploySchema

from serve_app.api.protocol import JSON
from serve_app.api.validation import is_port, lines, suggestion
from serve_app.auth.key_store import KeyStore
from serve_app.cli.errors import ConfigError
from serve_app.ingress import haproxy
from serve_app.ingress.status import BATCHES, QUOTAS, engine_name
from serve_app.settings.config_file import IMPORT_PATH, models_of
from serve_app.settings.environment import DRAINING, HARD_STOP, OFFLINE, Variable
from serve_app.settings.models import LLMSettings
from serve_app.settings.schema import Settings, parse
from serve_app.settings.sources import DEMO_MODEL
from serve_app.settings.user_config import parse_user_config
from serve_app.system.yaml_text import load

OWN_FUNCTIONS = "serve_app."
"""Beginning of the `target` of this project's functions, which download no files."""

INGRESS = "Ingress"
"""Name of the deployment of the HTTP front."""


def read_config(path: Path) -> ServeDeploySchema:
    """Read and check a Serve config, including the args of this project's applications.

    Raises:
        ConfigError: The file can't be read, or a value in it is wrong.
    """
    try:
        content = load(path.read_text())
        config = ServeDeploySchema.model_validate(content)
        # Serve itself ignores unknown keys, and so typos.
        if unknown := sorted(set(content) - set(ServeDeploySchema.model_fields)):
            known = suggestion(unknown[0], ServeDeploySchema.model_fields, few="allowed here:")
            raise ValueError(f"{unknown[0]}: unknown key{known}")
        port = (content.get("http_options") or {}).get("port")
        if isinstance(port, bool) or not is_port(config.http_options.port):
            raise ValueError(f"http_options.port: must be from 1 to 65535, not {port!r}")
        haproxy.read_limits(controller_environment(config))
        for app in config.applications:
            if app.import_path != IMPORT_PATH:
                continue
            settings = parse(app.args)
            if settings.access:
                KeyStore(settings.access, environment=_environment(app))
            _check_names(app, settings)
            languages = {engine_name(model.id) for model in settings.models if model.kind == "llm"}
            for deployment in app.deployments:
                if deployment.name in languages and isinstance(deployment.user_config, dict):
                    parse_user_config(deployment.user_config)
            for model in settings.models:
                if isinstance(model, LLMSettings):
                    _check_gpus(app, model)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValidationError as error:
        raise ConfigError(f"{path}: {'; '.join(lines(error, ServeDeploySchema))}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None
    return config


def _check_names(app: ServeApplicationSchema, settings: Settings) -> None:
    """Check the route prefix and the names of deployments, which Ray Serve checks after its start.

    Raises:
        ValueError: The prefix isn't a path, or the application has no deployment of a name.
    """
    prefix = app.route_prefix
    if prefix not in (None, "/") and (prefix != f"/{prefix.strip('/')}" or "{" in prefix):
        raise ValueError(f"route_prefix: {prefix!r}: must begin with /, not end with /, and have no braces")
    parts = {BATCHES: settings.batches, QUOTAS: settings.usage.quotas}
    there = [INGRESS, *(engine_name(model.id) for model in settings.models)]
    there += [name for name, part in parts.items() if part is not None]
    for deployment in app.deployments:
        if deployment.name not in there:
            known = suggestion(deployment.name, there)
            raise ValueError(f"deployments: {deployment.name}: there is no such deployment{known}")


def _check_gpus(app: ServeApplicationSchema, model: LLMSettings) -> None:
    """Check that Ray reserves a GPU for each process of a model's replica.

    Raises:
        ValueError: The number of GPUs and the number of processes differ.
    """
    engine, gpus = model.engine, model.processes
    sizes = {
        name: size
        for name in ("tensor_parallel_size", "pipeline_parallel_size")
        if (size := getattr(engine, name) or 1) > 1
    }
    for deployment in app.deployments:
        options = deployment.ray_actor_options
        if deployment.name != engine_name(model.id) or not isinstance(options, RayActorOptionsSchema):
            continue
        if model.nodes > 1 and options.num_gpus:
            raise ValueError(
                f"deployments: {deployment.name}: ray_actor_options.num_gpus: {options.num_gpus:g}: must be "
                f"left out, as the workers take the GPUs of {model.nodes} nodes"
            )
        # A CPU replica reserves no GPUs, and a simulated device has one process.
        if sizes and model.simulate is None and options.num_gpus and options.num_gpus != gpus:
            stated = " and ".join(f"{name} {size}" for name, size in sizes.items())
            raise ValueError(
                f"deployments: {deployment.name}: ray_actor_options.num_gpus: {options.num_gpus:g}: "
                f"must be {gpus}, as {stated} take a GPU per process"
            )


def own_variables(config: ServeDeploySchema) -> Iterator[Variable]:
    """Yield the variables that a Ray has which `saturate serve` starts for a config."""
    yield DRAINING
    models = [model for app in config.applications for model in models_of({"args": app.args})]
    if models and all(map(_needs_no_download, models)):
        yield OFFLINE


def _needs_no_download(model: JSON) -> bool:
    """Return whether a model is the demo, a simulation or a function of this project."""
    if model.get("kind") == "function":
        return str(model.get("target")).startswith(OWN_FUNCTIONS)
    return model.get("simulate") is not None or model.get("source") == DEMO_MODEL


def answer_s(config: ServeDeploySchema) -> float:
    """Return the most seconds for an answer while its replica stops."""
    limits = (_environment(app).get(HARD_STOP.name, HARD_STOP.value) for app in config.applications)
    return max(map(float, limits), default=float(HARD_STOP.value))


def controller_environment(config: ServeDeploySchema) -> Mapping[str, str]:
    """Return the environment of Serve's controller, which starts HAProxy."""
    options = config.controller_options
    own: dict[str, str] = ((options and options.runtime_env) or {}).get("env_vars", {})
    return os.environ | own


def asks_for_keys(config: ServeDeploySchema) -> bool:
    """Return whether every application of a config has `access`, and so requires API keys."""
    return all(app.import_path == IMPORT_PATH and app.args.get("access") for app in config.applications)


def set_request_log(config: ServeDeploySchema, log_format: str) -> None:
    """Set `telemetry.request_log` in this project's applications."""
    for app in config.applications:
        if app.import_path == IMPORT_PATH:
            app.args["telemetry"] = (app.args.get("telemetry") or {}) | {"request_log": log_format}


def _environment(app: ServeApplicationSchema) -> Mapping[str, str]:
    """Return the environment of an application's replicas."""
    own: dict[str, str] = (app.runtime_env or {}).get("env_vars", {})
    return os.environ | own
