"""Completion of a Serve config with the variables that a short config leaves out.

A complete config names the functions that set the environment (`serve_app.settings.environment`). A value
that the config sets is kept. If the config sets a variable for the controller or the replicas alone, and both
must have the same value, the value is copied.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from serve_app.api.protocol import JSON
from serve_app.settings.addresses import is_loopback
from serve_app.settings.config_file import environment_of, mapping, models_of, own_applications
from serve_app.settings.environment import CONTROLLER, DRAINING, OFFLINE, REPLICAS, SHARED, Variable
from serve_app.settings.sources import DEMO_MODEL

OWN_FUNCTIONS = "serve_app."
"""Beginning of the `target` of this project's functions, which download no files."""


@dataclass(frozen=True)
class Missing:
    """The variables that a config leaves out.

    Attributes:
        controller: The variables of `controller_options`.
        applications: The variables of the applications, by their place in the list.
    """

    controller: tuple[Variable, ...] = ()
    applications: Mapping[int, tuple[Variable, ...]] = field(default_factory=dict)

    def __bool__(self) -> bool:
        return bool(self.controller) or any(self.applications.values())


def missing_variables(config: JSON) -> Missing:
    """Return the variables that a config leaves out; empty if it has no application of this project.

    Args:
        config: A Serve config. A part of a wrong type counts as left out.
    """
    apps = own_applications(config)
    if not apps:
        return Missing()
    controller = environment_of(config.get("controller_options"))
    replicas = {index: environment_of(app) for index, app in apps.items()}
    said = {name: value for own in (*replicas.values(), controller) for name, value in own.items()}
    agreed = [replace(one, value=str(said[one.name]), reason="") for one in SHARED if one.name in said]
    # Ray Serve's default is all interfaces.
    one_machine = is_loopback(str(mapping(config.get("http_options")).get("host")))
    models = [model for app in apps.values() for model in models_of(app)]
    offline = bool(models) and all(map(_needs_no_download, models))
    chosen = [REPLICAS, *([DRAINING] if one_machine else []), *([OFFLINE] if offline else []), *agreed]
    return Missing(
        tuple(one for one in (CONTROLLER, *agreed) if one.name not in controller),
        {index: tuple(one for one in chosen if one.name not in own) for index, own in replicas.items()},
    )


def complete_config(config: JSON) -> JSON:
    """Return a config with the variables that it leaves out.

    Args:
        config: A Serve config; it is not changed.
    """
    missing = missing_variables(config)
    whole = copy.deepcopy(config)
    if missing.controller:
        whole["controller_options"] = mapping(whole.get("controller_options"))
        _add(whole["controller_options"], missing.controller)
    for index, variables in missing.applications.items():
        if variables:
            _add(whole["applications"][index], variables)
    return whole


def _add(section: JSON, variables: tuple[Variable, ...]) -> None:
    section["runtime_env"] = runtime_env = mapping(section.get("runtime_env"))
    added = {variable.name: variable.value for variable in variables}
    runtime_env["env_vars"] = added | mapping(runtime_env.get("env_vars"))


def _needs_no_download(model: JSON) -> bool:
    """Return whether a model is the demo, a simulation or a function of this project."""
    if model.get("kind") == "function":
        return str(model.get("target")).startswith(OWN_FUNCTIONS)
    return model.get("simulate") is not None or model.get("source") == DEMO_MODEL
