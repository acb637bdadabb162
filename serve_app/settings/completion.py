"""Completion of a Serve config: the environment variables that a short config leaves out.

A value that the config sets is kept. A variable that the controller and the replicas must agree on, and that
the config sets for one of them, gets the same value for the other.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from serve_app.api.protocol import JSON
from serve_app.settings.addresses import is_loopback
from serve_app.settings.environment import (
    CLIENT_HEADERS,
    LONG_ANSWERS,
    MESSAGES,
    TRANSPORT,
    Variable,
    controller_variables,
    replica_variables,
)
from serve_app.settings.sources import DEMO_MODEL

IMPORT_PATH = "serve_app.app:build"
"""The `import_path` of this project's applications."""

SHARED = (*TRANSPORT, CLIENT_HEADERS, *LONG_ANSWERS)
"""The variables that must have the same value for the controller and the replicas."""

OWN_FUNCTIONS = "serve_app."
"""Beginning of the `target` of functions that load no file from elsewhere."""


@dataclass(frozen=True)
class Missing:
    """The variables that a config leaves out.

    Attributes:
        controller: Those of `controller_options`.
        applications: Those of the applications, by their place in the list.
    """

    controller: tuple[Variable, ...] = ()
    applications: Mapping[int, tuple[Variable, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.controller) or any(self.applications.values())


def missing_variables(config: JSON) -> Missing:
    """Return the variables that a config leaves out; none if it has no application of this project.

    Args:
        config: A Serve config. A part of a wrong type counts as left out.
    """
    apps = {
        index: app
        for index, app in enumerate(_list(config.get("applications")))
        if _mapping(app).get("import_path") == IMPORT_PATH
    }
    if not apps:
        return Missing()
    controller = _environment(config.get("controller_options"))
    replicas = {index: _environment(app) for index, app in apps.items()}
    said = {name: value for own in (*replicas.values(), controller) for name, value in own.items()}
    agreed = {variable.name: str(said[variable.name]) for variable in SHARED if variable.name in said}
    # Ray Serve's default is all interfaces.
    one_machine = is_loopback(str(_mapping(config.get("http_options")).get("host")))
    rehearsal = all(_needs_no_download(model) for app in apps.values() for model in _models(app))
    long_answers = not (one_machine and rehearsal)
    return Missing(
        _left_out(controller_variables(long_answers=long_answers), agreed, controller),
        {
            index: _left_out(
                replica_variables(
                    long_answers=long_answers,
                    one_machine=one_machine,
                    cpu=not _takes_gpus(app),
                    offline=rehearsal,
                    largest_body=_largest_body(app),
                ),
                agreed,
                replicas[index],
            )
            for index, app in apps.items()
        },
    )


def complete_config(config: JSON) -> JSON:
    """Return a config with the variables that it leaves out.

    Args:
        config: A Serve config; it is not changed.
    """
    missing = missing_variables(config)
    whole = copy.deepcopy(config)
    if missing.controller:
        whole["controller_options"] = _mapping(whole.get("controller_options"))
        _add(whole["controller_options"], missing.controller)
    for index, variables in missing.applications.items():
        if variables:
            _add(whole["applications"][index], variables)
    return whole


def _left_out(
    variables: Sequence[Variable], agreed: Mapping[str, str], own: Mapping[str, Any]
) -> tuple[Variable, ...]:
    """Return the variables of a place that it doesn't set, with the values that both places agree on."""
    names = {variable.name for variable in variables}
    wanted = (*variables, *(one for one in SHARED if one.name in agreed and one.name not in names))
    return tuple(
        replace(variable, value=agreed.get(variable.name, variable.value))
        for variable in wanted
        if variable.name not in own
    )


def _add(section: JSON, variables: Sequence[Variable]) -> None:
    section["runtime_env"] = runtime_env = _mapping(section.get("runtime_env"))
    added = {variable.name: variable.value for variable in variables}
    runtime_env["env_vars"] = added | _mapping(runtime_env.get("env_vars"))


def _needs_no_download(model: JSON) -> bool:
    """Return whether a model is the demo, a simulation or a function of this project, with quick answers."""
    if model.get("kind") == "function":
        return str(model.get("target")).startswith(OWN_FUNCTIONS)
    return model.get("simulate") is not None or model.get("source") == DEMO_MODEL


def _takes_gpus(app: JSON) -> bool:
    """Return whether a deployment of an application reserves GPUs."""
    for deployment in _list(app.get("deployments")):
        options = _mapping(_mapping(deployment).get("ray_actor_options"))
        bundles = _list(_mapping(deployment).get("placement_group_bundles"))
        if options.get("num_gpus") or any(_mapping(bundle).get("GPU") for bundle in bundles):
            return True
    return False


def _largest_body(app: JSON) -> int:
    size = _mapping(_mapping(app.get("args")).get("ingress")).get("max_body_bytes")
    return size if isinstance(size, int) else int(MESSAGES.value) // 2


def _models(app: JSON) -> Iterator[JSON]:
    return map(_mapping, _list(_mapping(app.get("args")).get("models")))


def _environment(section: Any) -> JSON:
    return _mapping(_mapping(_mapping(section).get("runtime_env")).get("env_vars"))


def _mapping(value: Any) -> JSON:
    return value if isinstance(value, dict) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []
