"""What `serve run` imports: a config's `args` in, an application out."""

from typing import Any

from ray import serve
from ray.serve import Application
from ray.serve._private.constants import RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S

from serve_app.engine.function import FunctionEngine
from serve_app.engine.llm import Engine
from serve_app.ingress.deployment import Ingress
from serve_app.ingress.health import engine_name
from serve_app.settings.schema import FunctionSettings, ModelSettings, Settings, parse

UNBOUNDED = 100_000
"""The batcher bounds what waits, by tokens and with an answer that says when to come back; Serve's own
limit on ongoing requests is set where it can't cut in before."""

HEALTH_CHECK_PERIOD_S = 1
"""A replica that has died is missed, and replaced, at the next check; one that fails it, after three."""

GRACE_S = float(RAY_SERVE_HAPROXY_HARD_STOP_AFTER_S)
"""What a replica that stops may take to finish its answers: as long as HAProxy lets them run. So one setting
says how long a stream may be. A replica that has nothing left to answer doesn't take it."""
QUIET = {"enable_access_log": False}


def build(args: dict[str, Any]) -> Application:
    """Return the application that a config describes: one Engine per model behind an Ingress.

    Args:
        args: See `serve_app.settings.schema.Settings`.

    Raises:
        SettingsError: The args are wrong.
    """
    settings = parse(args)
    ingress = serve.deployment(
        max_ongoing_requests=UNBOUNDED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # It does little at a time, so one that is silent for three checks hangs.
        health_check_timeout_s=10,
        graceful_shutdown_timeout_s=GRACE_S,
        # New ones are there before old ones go: an HAProxy that is being replaced knows only those of its
        # own time, and sends on to them what comes over connections that it still holds.
        max_surge_percent=100,
        # It writes its own line per request; see `TelemetrySettings`.
        logging_config=QUIET,
    )(serve.ingress()(Ingress))
    engines = {model.id: _engine(model, settings) for model in settings.models}
    return ingress.bind(settings, engines)


def _engine(model: ModelSettings, settings: Settings) -> Application:
    kind: type[Any] = FunctionEngine if isinstance(model, FunctionSettings) else Engine
    deployment = serve.deployment(
        max_ongoing_requests=UNBOUNDED,
        health_check_period_s=HEALTH_CHECK_PERIOD_S,
        # A burst may keep a replica from answering for a while.
        health_check_timeout_s=30,
        graceful_shutdown_timeout_s=GRACE_S,
        logging_config=QUIET,
    )(kind)
    return deployment.options(name=engine_name(model.id)).bind(
        model, settings.ingress.max_prompts, settings.telemetry
    )
