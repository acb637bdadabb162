"""A Serve config with the settings that were chosen."""

import copy
from dataclasses import dataclass

from serve_app.api.protocol import JSON
from serve_app.tuning.choice import Choice


class ChangeError(ValueError):
    """A config has no such model; the message names what it has."""


@dataclass(frozen=True, slots=True)
class Change:
    """A changed Serve config.

    Attributes:
        config: The config.
        left_out: Settings that it doesn't get, each with the reason.
    """

    config: JSON
    left_out: tuple[str, ...]


def changed(config: JSON, model: str, choice: Choice) -> Change:
    """Return a Serve config with the chosen settings.

    They go into the `user_config` of the model's deployment, and a change of that alone restarts nothing.

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
        raise ChangeError(f"it has no model {model!r}")
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
